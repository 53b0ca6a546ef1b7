"""Traces calls of a step with JAX's profiler, and says where the devices' time went, beside the plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from rich import box
from rich.table import Table

from spmdctx.audit.hlo import read_module
from spmdctx.errors import PlanError
from spmdctx.plan.plan import Plan
from spmdctx.plan.show.terminal import plain_text
from spmdctx.step.report.calls import Calls, drain
from spmdctx.step.report.rows import Named, ProfileRow, RowKind, joined, planned_rows
from spmdctx.step.report.trace import read_events, spent, traces_in
from spmdctx.wording import counted, seconds_text
from spmdctx.wording.reports import Report

_MOST_ROWS = 24


def _no_calls() -> Calls | None:
    return None


def _unwatched(_: Profile | None) -> None:
    """Tells nobody of a profile."""


class Profile(Report):
    """Where the devices' time of a step went: a context that traces the calls inside, and afterwards their report.

    A step that was not called before compiles in its first call: the trace begins behind it. A PlanError ends the context if no call was
    traced.

    Attributes:
        folder: where JAX's own trace lies, for TensorBoard's profiler or xprof.
        name: the step's.
        num_calls: that were traced.
        num_devices: of this process whose ops the trace names.
        rows: device seconds of one step beside the planned ones, the longest first. Those of all rows add up to `busy_s`.
        busy_s: in which a device computed or communicated, in one step and the mean of the devices.
        planned_s: the plan's step.
        notes: what the trace could not say.
    """

    kind = "profile"

    def __init__(
        self, folder: str | os.PathLike[str], calls: Callable[[], Calls | None], watch: Callable[[Profile | None], None] = _unwatched
    ) -> None:
        self.folder = Path(folder)
        self.name, self.num_calls, self.num_devices = "", 0, 0
        self.rows: tuple[ProfileRow, ...] = ()
        self.busy_s, self.planned_s = 0.0, 0.0
        self.notes: tuple[str, ...] = ()
        self._calls, self._watch = calls, watch
        self._is_traced = False
        self._before: tuple[Calls | None, int] = (None, 0)
        self._traces: set[Path] = set()

    def __getstate__(self) -> dict[str, Any]:
        # The report goes into another process, the step does not.
        return {**self.__dict__, "_calls": _no_calls, "_watch": _unwatched, "_before": (None, 0)}

    def __enter__(self) -> Self:
        self._watch(self)
        if self._calls() is not None:
            self._begin()
        return self

    def compiled(self) -> None:
        """Takes note of a call that has compiled the step. The trace begins behind it, unless it has begun before."""
        if self._is_traced:
            self.notes += ("A call in the trace compiled the step: it has other shapes than those before.",)
        else:
            self._begin()

    def _begin(self) -> None:
        before = self._calls()
        self._before = before, 0 if before is None else before.count
        self._wait()
        self._traces = traces_in(self.folder)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows the calls down
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._is_traced = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._watch(None)
        if self._is_traced:
            self._wait()
            jax.profiler.stop_trace()
        if kind is None:
            self._read()

    def _wait(self) -> None:
        calls = self._calls()
        (drain if calls is None else calls.wait)(jax.local_devices())

    def _read(self) -> None:
        calls = self._calls()
        before, count = self._before
        self.num_calls = 0 if calls is None or not self._is_traced else calls.count - (count if calls is before else 0)
        if calls is None or not self.num_calls:
            raise PlanError(
                "No call of the step was traced.",
                fix="call the step inside of `with step.profile(folder):`, twice or more if it has not run before: the first call compiles",
            )
        entry = calls.entry
        self.name = entry.captured.name
        events = [event for path in sorted(traces_in(self.folder) - self._traces) for event in read_events(path)]
        self.num_devices = len({event.device for event in events})
        planned: dict[tuple[RowKind, str], float] = {}
        names: dict[tuple[RowKind, str], str] = {}
        if type(entry.plan) is not Plan:
            named = Named(read_module(""), "", entry.plan.logical_mesh)
            self.planned_s = getattr(entry.plan, "step_s", entry.plan.cost.total_s)
            self.notes += ("Only steps of one program on one mesh have their rows beside the plan's.",)
        else:
            text = entry.lower(entry.captured.in_avals).compile().as_text() or ""
            named = Named(read_module(text), text.partition("HloModule ")[2].partition(",")[0], entry.plan.logical_mesh)
            planned, names = planned_rows(entry.planned, entry.environment.settings.topology)
            self.planned_s = entry.plan.cost.total_s
        if not events:
            self.notes += (f"The trace names no op of {jax.default_backend().upper()} devices, so that no time can be given.",)
        measured = spent(events, named.rank)
        runs = max(self.num_devices, 1) * self.num_calls
        self.rows = joined(measured, named, planned, names, runs)
        self.busy_s = sum(one.own_s for one in measured.values()) / runs

    def _figures(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ratio": row.ratio} for row in self.rows]
        own = {name: getattr(self, name) for name in ("name", "num_calls", "num_devices", "busy_s", "planned_s")}
        return {**own, "rows": rows, "notes": self.notes, "folder": str(self.folder)}

    def __str__(self) -> str:
        return plain_text(self.__rich__())

    def __rich__(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="dim", title_justify="left", caption_justify="left")
        table.title = f"{self.name}, {counted(self.num_calls, 'call')} traced: a device is busy for {seconds_text(self.busy_s)} a step"
        table.title += f", planned {seconds_text(self.planned_s)}"
        for column in ("", "measured", "behind others", "planned", "planned / measured", "runs a step"):
            table.add_column(column, justify="right" if column else "left", overflow="fold")
        for row in self.rows[:_MOST_ROWS]:
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            figures = (row.measured_s, row.behind_s or None, row.planned_s)
            table.add_row(row.what, *("" if one is None else seconds_text(one) for one in figures), ratio, f"{row.count:.4g}")
        rest = self.rows[_MOST_ROWS:]
        if rest:
            sums = (sum(row.measured_s for row in rest), sum(row.behind_s for row in rest), sum(row.planned_s or 0.0 for row in rest))
            table.add_row(f"{len(rest)} more, in .rows", *map(seconds_text, sums), "", "")
        table.caption = " ".join(self.notes) or None
        return table
