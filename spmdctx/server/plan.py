"""The plan of a step on servers: that of a worker's part, and what each server holds and exchanges."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass, fields
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spmdctx.errors import UnsupportedError
from spmdctx.plan.plan import Plan
from spmdctx.plan.show.plain import plan_figures
from spmdctx.plan.show.terminal import plain_text
from spmdctx.plan.summary.sentence import phrase_of
from spmdctx.server.loads import LocalLoad, ServerLoad
from spmdctx.wording import bytes_text, counted, seconds_text
from spmdctx.wording.reports import stamped

_BYTES_PER_S = 800e6
"""What 2 servers and 2 workers exchanged on two cores by Ray 2.60; a network may be slower."""

_NO_LOAD = LocalLoad()


@dataclass(frozen=True, eq=False, repr=False)
class ServedPlan(Plan):
    """The plan of the program that a worker runs for one part of the batch, with the servers around it.

    Attributes:
        servers: one row for each.
        num_parts: of each step.
        num_workers: among which the parts are dealt.
        local: what each worker holds.
    """

    servers: tuple[ServerLoad, ...] = ()
    num_parts: int = 1
    num_workers: int = 1
    local: LocalLoad = _NO_LOAD

    @property
    def summary(self) -> str:
        """What the plan is, such as "State on 2 servers, 4 workers, each: one device, nothing is split"."""
        where = f"{counted(len(self.servers), 'server')}, {counted(self.num_workers, 'worker')}"
        return f"State on {where}, each: {phrase_of(self)}"

    @property
    def exchange_s(self) -> float:
        """Predicted seconds of a step in which arrays pass between workers and servers, one after the other."""
        pulled = self.num_workers * sum(one.pulled_bytes for one in self.servers)
        return (pulled + sum(one.pushed_bytes for one in self.servers)) / _BYTES_PER_S

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step: the parts of the worker that has most, and the exchange."""
        return -(-self.num_parts // self.num_workers) * self.cost.total_s + self.exchange_s

    def export(self, kind: str, path: str | os.PathLike[str]) -> None:
        """Refuses: no module without spmdctx exchanges arrays with servers."""
        raise UnsupportedError(
            "The plan of a step on servers cannot be exported.", got=f"export({kind!r})", fix="plan the step with enable_ps=False"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns what the tables say as plain data, in seconds and bytes, with its versioned "schema"; the servers come last."""
        names = ("servers", "local", "num_parts", "num_workers", "step_s")
        return stamped("served_plan", {**plan_figures(self), **{name: getattr(self, name) for name in names}})

    def _repr_html_(self) -> str:
        page = super()._repr_html_()
        return f"<pre>{html.escape(plain_text(Group(*_servers(self))))}</pre>{page}"

    def __str__(self) -> str:
        return plain_text(self.__rich__())

    def __rich__(self) -> Group:
        return Group(*_servers(self), super().__rich__())


def served_plan(part: Plan, servers: tuple[ServerLoad, ...], num_parts: int, num_workers: int, local: LocalLoad = _NO_LOAD) -> ServedPlan:
    """Adds the servers to the plan of a worker's part, and what each worker holds."""
    own = {field.name: getattr(part, field.name) for field in fields(part)}
    return ServedPlan(**own, servers=servers, num_parts=num_parts, num_workers=num_workers, local=local)


def _servers(plan: ServedPlan) -> list[RenderableType]:
    parts = f"{counted(plan.num_parts, 'part')} on {counted(plan.num_workers, 'worker')}"
    title = Text.assemble(("Servers  ", "bold"), f"{counted(len(plan.servers), 'server')}, {parts}: {seconds_text(plan.step_s)} a step, ")
    title.append(f"of it {seconds_text(plan.exchange_s)} between workers and servers")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("server", "arrays", "holds", "is pushed", "sends each worker", "sends servers"):
        table.add_column(name, justify="right")
    for number, one in enumerate(plan.servers):
        sizes = map(bytes_text, (one.num_bytes, one.pushed_bytes, one.pulled_bytes, one.exchanged_bytes))
        table.add_row(str(number), str(len(one.arrays)), *sizes)
    if plan.local.arrays:
        table.add_row("each worker", str(len(plan.local.arrays)), bytes_text(plan.local.num_bytes), "", "", "")
    return [Text(plan.summary + ".", style="bold"), title, table, Text.assemble(("A worker's part", "bold"))]
