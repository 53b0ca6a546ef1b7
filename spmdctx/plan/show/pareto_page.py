"""Time against memory as a page: a chart of all plans, and their table."""

from __future__ import annotations

from html import escape

from spmdctx.plan.pareto import Pareto, table_rows
from spmdctx.plan.show.charts import Mark, scatter_chart
from spmdctx.plan.show.page import NUM_COLOURS, styled
from spmdctx.wording import bytes_text, counted, mesh_text, seconds_text

_HEAD = ("devices", "mesh", "budget", "memory", "step", "device-seconds", "")


def pareto_page(found: Pareto) -> str:
    """The page as a fragment; its style reaches nothing outside."""
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
        for cells, on_front in table_rows(found, front)
    )
    table = f'<div class="grid pareto"><div class="row head">{head}</div>{rows}</div>'
    legend = f'<ul class="legend">{keys}<li class="muted">filled: no other plan beats it</li></ul>'
    return styled(f"<h1>Time against memory</h1>{legend}{chart}{table}")
