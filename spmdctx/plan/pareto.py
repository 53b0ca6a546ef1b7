"""Time against memory: one step planned under several budgets on several numbers of devices, and which of these plans count.

A point is on the front where no other point on at most as many devices needs at most as much memory and at most as much time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmdctx.errors import InfeasibleError, StrategyError, UnsupportedError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.plan.plan import Plan
from spmdctx.wording import bytes_text, mesh_text, seconds_text

FRACTIONS = (0.75, 0.5, 0.375, 0.25, 0.125)
"""Default budgets, as parts of what the fastest plan on that many devices needs."""

WIDTH = 120


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One plan: what it was allowed to need (None for no budget), what it needs at the peak, and how long a step takes.

    `also_limit_bytes` are the other budgets under which the plan needs and takes the same, the largest first.
    """

    num_devices: int
    mesh: LogicalMesh
    memory_limit_bytes: int | None
    memory_bytes: int
    total_s: float
    also_limit_bytes: tuple[int, ...] = ()

    @property
    def device_s(self) -> float:
        """Device-seconds of a step: what it costs, as against how long it takes."""
        return self.num_devices * self.total_s


@dataclass(frozen=True, slots=True)
class Unmet:
    """A budget that no plan meets on that many devices, or strategies that do not fit them, and what the planner said."""

    num_devices: int
    memory_limit_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Pareto:
    """All points, by number of devices, then the fastest first; `plans` are theirs, in the same order."""

    points: tuple[ParetoPoint, ...]
    unmet: tuple[Unmet, ...]
    plans: tuple[Plan, ...]

    @property
    def front(self) -> tuple[ParetoPoint, ...]:
        """Points that no other one beats in devices, memory and time together."""
        return tuple(point for point in self.points if not any(_beats(other, point) for other in self.points))

    def __rich__(self) -> Table:
        return _table(self)

    def __str__(self) -> str:
        buffer = io.StringIO()
        Console(file=buffer, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

    def _repr_html_(self) -> str:
        from spmdctx.plan.show.pareto_page import pareto_page

        return pareto_page(self)


def pareto(plan: Plan, memory_bytes: Sequence[int] = (), num_devices: Sequence[int] = ()) -> Pareto:
    """Plans the step of `plan` again under each budget on each number of devices; see `Plan.pareto`."""
    replan = plan.replan
    if replan is None:
        raise UnsupportedError(
            "This plan cannot be planned again: it does not hold the step that it was made for.",
            fix="plan the step again in auto_parallel, and ask that plan",
        )
    own = plan.logical_mesh.num_devices
    counts = tuple(num_devices) or tuple(dict.fromkeys((max(own // 2, 1), own, own * 2)))
    rows: list[tuple[ParetoPoint, Plan]] = []
    unmet: list[Unmet] = []
    for count in sorted(set(counts)):
        rows += _on(replan, count, tuple(memory_bytes), unmet)
    return Pareto(tuple(point for point, _ in rows), tuple(unmet), tuple(made for _, made in rows))


def _on(replan: Callable[..., Plan], count: int, budgets: tuple[int, ...], unmet: list[Unmet]) -> list[tuple[ParetoPoint, Plan]]:
    """The points on one number of devices, the one without a budget among them; one below another that nothing met is not tried.

    Without a budget a search keeps to the memory of the machine, so a larger one may still give another plan.
    """
    found: dict[tuple[int, float], tuple[ParetoPoint, Plan]] = {}

    def attempt(limit: int | None) -> Plan | None:
        try:
            made = replan(memory_bytes=limit, num_devices=count)
        except (InfeasibleError, StrategyError) as error:
            unmet.append(Unmet(count, limit, error.summary))
            return None
        point = ParetoPoint(count, made.logical_mesh, limit, made.cost.memory_bytes, made.cost.total_s)
        known, plan = found.setdefault((point.memory_bytes, point.total_s), (point, made))
        if known is not point and limit is not None:
            found[point.memory_bytes, point.total_s] = replace(known, also_limit_bytes=(*known.also_limit_bytes, limit)), plan
        return made

    fastest = attempt(None)
    if fastest is None:
        return []
    for limit in sorted(set(budgets), reverse=True) or [int(fastest.cost.memory_bytes * part) for part in FRACTIONS]:
        if attempt(limit) is None:
            break
    return sorted(found.values(), key=lambda row: (row[0].total_s, row[0].memory_bytes))


def _beats(one: ParetoPoint, other: ParetoPoint) -> bool:
    mine, its = ((point.num_devices, point.memory_bytes, point.total_s) for point in (one, other))
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def _table(found: Pareto) -> Table:
    front = set(found.front)
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    for name in ("devices", "mesh", "budget", "memory", "step", "device-seconds", ""):
        table.add_column(name, justify="left" if name in ("mesh", "") else "right", overflow="fold")
    for cells, on_front in table_rows(found, front):
        table.add_row(*[Text(cell, style="bold" if on_front else "dim") for cell in cells])
    return table


def table_rows(found: Pareto, front: set[ParetoPoint]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Cells of one row per point and per unmet budget, and whether it is on the front."""
    for point in found.points:
        limit = ", ".join(_limit_text(one) for one in (point.memory_limit_bytes, *point.also_limit_bytes))
        cost = (bytes_text(point.memory_bytes), seconds_text(point.total_s), f"{point.device_s:.3g}")
        on_front = point in front
        yield (str(point.num_devices), mesh_text(point.mesh), limit, *cost, "" if on_front else "beaten by another"), on_front
    for one in found.unmet:
        yield (str(one.num_devices), "", _limit_text(one.memory_limit_bytes), "", "", "", one.reason), False


def _limit_text(limit: int | None) -> str:
    return "none" if limit is None else bytes_text(limit)
