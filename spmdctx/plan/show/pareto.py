"""Shows time against memory: as a table for a terminal, and as a page with a chart of all plans."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from spmdctx.plan.data import AnyPlan
from spmdctx.plan.pareto import ParetoData, ParetoPoint, Progress, Unmet
from spmdctx.plan.show.charts import Mark, scatter_chart
from spmdctx.plan.show.page import NUM_COLOURS, styled
from spmdctx.plan.show.plain import pareto_figures
from spmdctx.plan.show.terminal import plain_text
from spmdctx.wording import bytes_text, counted, mesh_text, seconds_text
from spmdctx.wording.reports import Report

_WIDTH = 100
_HEAD = ("devices", "mesh", "budget", "memory", "step", "device-seconds", "")


@dataclass(frozen=True, slots=True)
class Pareto(ParetoData[AnyPlan], Report):
    """The answer of `Plan.pareto`; it prints itself, and draws itself in a notebook."""

    kind = "pareto"

    def _figures(self) -> dict[str, Any]:
        return pareto_figures(self)

    def __rich__(self) -> Group:
        return Group(_table(self), *[Text(f"note: {note}", style="dim") for note in self.notes])

    def __str__(self) -> str:
        return plain_text(self)

    def _repr_html_(self) -> str:
        return _page(self)


_QUIET_S = 1.0
"""Seconds after which progress is shown."""


@contextmanager
def showing(progress: Progress | None) -> Iterator[Progress]:
    """Gives what is to be called with each point: the user's own, or a line in a terminal, after a second."""
    console = Console(stderr=True)
    if progress is not None or not console.is_terminal or console.is_jupyter:
        yield progress or (lambda _: None)
        return
    start, points, unmet = time.monotonic(), 0, 0

    def tell(found: ParetoPoint | Unmet) -> None:
        nonlocal points, unmet
        points, unmet = points + isinstance(found, ParetoPoint), unmet + isinstance(found, Unmet)
        if time.monotonic() - start > _QUIET_S:
            last = f"{counted(found.num_devices, 'device')}, budget {_limit_text(found.memory_limit_bytes)}"
            line = f"pareto: {counted(points, 'plan')}, {counted(unmet, 'budget')} not met; last: {last} (Ctrl-C keeps them)"
            sys.stderr.write(f"\r{line:<{_WIDTH}}")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        if time.monotonic() - start > _QUIET_S:
            sys.stderr.write(f"\r{'':<{_WIDTH}}\r")


def _table(found: ParetoData[AnyPlan]) -> Table:
    front = set(found.front)
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    for name in _HEAD:
        table.add_column(name, justify="left" if name in ("mesh", "") else "right", overflow="fold")
    for cells, on_front in _rows(found, front):
        table.add_row(*[Text(cell, style="bold" if on_front else "dim") for cell in cells])
    return table


def _rows(found: ParetoData[AnyPlan], front: set[ParetoPoint]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Gives the cells of one row per point and per unmet budget, and whether it is on the front."""
    for point in found.points:
        limit = ", ".join(_limit_text(one) for one in (point.memory_limit_bytes, *point.also_limit_bytes))
        cost = (bytes_text(point.memory_bytes), seconds_text(point.total_s), f"{point.device_s:.3g}")
        on_front = point in front
        yield (str(point.num_devices), mesh_text(point.mesh), limit, *cost, "" if on_front else "beaten by another"), on_front
    for one in found.unmet:
        yield (str(one.num_devices), "", _limit_text(one.memory_limit_bytes), "", "", "", one.reason), False


def _limit_text(limit: int | None) -> str:
    return "none" if limit is None else bytes_text(limit)


def _page(found: ParetoData[AnyPlan]) -> str:
    """Returns the page as a fragment; its style reaches nothing outside."""
    front = set(found.front)
    counts = list(dict.fromkeys(point.num_devices for point in found.points))
    colours = {count: f"axis{index % NUM_COLOURS}" for index, count in enumerate(counts)}
    marks = [
        Mark(
            point.memory_bytes,
            point.total_s,
            colours[point.num_devices],
            f"{counted(point.num_devices, 'device')}, {mesh_text(point.mesh)}: "
            f"{seconds_text(point.total_s)}, {bytes_text(point.memory_bytes)}",
            point in front,
        )
        for point in found.points
    ]
    chart = ""
    if marks:
        ends = (bytes_text(max(mark.x for mark in marks)), seconds_text(max(mark.y for mark in marks)))
        chart = scatter_chart(marks, (*ends, "memory per device", "seconds of a step"), "time against memory")
    keys = "".join(f'<li><i class="key {colours[count]}"></i>{counted(count, "device")}</li>' for count in counts)
    head = "".join(f"<span>{name}</span>" for name in _HEAD)
    rows = "".join(
        f'<div class="row{"" if on_front else " muted"}">{"".join(f"<span>{escape(cell)}</span>" for cell in cells)}</div>'
        for cells, on_front in _rows(found, front)
    )
    table = f'<div class="grid pareto"><div class="row head">{head}</div>{rows}</div>'
    legend = f'<ul class="legend">{keys}<li class="muted">filled: no other plan beats it</li></ul>'
    notes = "".join(f'<p class="muted">{escape(note)}</p>' for note in found.notes)
    return styled(f"<h1>Time against memory</h1>{legend}{chart}{table}{notes}")
