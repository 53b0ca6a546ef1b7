"""Draws parts of the page: where the time of a step goes, and the memory that is alive over it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from spmdctx.ir.collective import MOVES, SUMS, Collective
from spmdctx.plan.data import PlanData
from spmdctx.plan.show.charts import area_chart
from spmdctx.plan.summary.rates import device_bytes
from spmdctx.wording import TIMES, bytes_text, seconds_text, share_text

ACTIVATIONS = "moving activations"
OWN = "collectives of the step itself"


_HIGHEST = 8
"""A limit so many times above the peak is named, and not drawn: the rest would be flat."""


class Part(NamedTuple):
    """A share of a step: its name, its seconds, its executions in a step, and its CSS class."""

    name: str
    time_s: float
    num_runs: int
    style: str


def time_parts(plan: PlanData) -> list[Part]:
    """Returns compute first, then communication by its cause, the longest first."""
    roles = {tensor.path: tensor.role.value for tensor in plan.inputs}
    sums: dict[str, tuple[float, int]] = {}
    for row in plan.collectives:
        name = _cause(row, roles)
        time_s, count = sums.get(name, (0.0, 0))
        sums[name] = (time_s + row.time_s * row.repeats, count + row.repeats)
    causes = sorted(sums.items(), key=lambda item: -item[1][0])
    styles = ("all_reduce", "all_to_all", "all_gather", "collective_permute", "reduce_scatter", "other")
    parts = [Part("compute", plan.cost.compute_s, len(plan.ops), "compute")]
    for index, (name, (time_s, count)) in enumerate(causes):
        parts.append(Part(name, time_s, count, styles[min(index, len(styles) - 1)]))
    return parts


def _cause(row: Collective, roles: dict[str, str]) -> str:
    """Returns in a few words what a collective is for, and over which axes it runs."""
    over = f" over {'+'.join(row.axes)}"
    if row.cause.form in SUMS:
        return row.cause + over
    if row.cause.form not in MOVES:
        return OWN
    path = row.cause.gaps["path"]
    return (f"moving {roles[path]} leaves" if path in roles else ACTIVATIONS) + over


def time_bands(plan: PlanData) -> str:
    """Draws compute and communication as one bar, with a legend; empty if nothing takes time."""
    parts = time_parts(plan)
    total = sum(part.time_s for part in parts)
    if total <= 0:
        return ""
    bands = "".join(
        f'<b class="{part.style}" style="flex:{max(part.time_s / total, 0.003):.4f}" title="{escape(part.name)}"></b>' for part in parts
    )
    rows = "".join(_legend(part, total) for part in parts)
    hidden = plan.cost.hidden_communication_s
    more = f'<li class="muted">{seconds_text(hidden)} of communication hides behind compute</li>' if hidden else ""
    return f'<div class="bands tall">{bands}</div><ul class="legend">{rows}{more}</ul>'


def _legend(part: Part, total: float) -> str:
    detail = f"{seconds_text(part.time_s)}, {share_text(part.time_s, total)}"
    runs = f", {part.num_runs} {TIMES}" if part.style != "compute" else ""
    return f'<li><i class="key {part.style}"></i>{escape(part.name)} <small>{detail}{runs}</small></li>'


def memory_chart(plan: PlanData) -> str:
    """Draws the bytes of one device that are alive at each op, with the budget across; empty if they are not known."""
    profile: Sequence[int] | None = plan.memory_profile
    if profile is None or len(profile) < 2:
        return ""
    peak = max(range(len(profile)), key=profile.__getitem__)
    limit = plan.memory_limit_bytes or device_bytes(plan)
    top = profile[peak]
    shown = limit if limit is not None and limit < _HIGHEST * top else None
    ends = (f"{bytes_text(top)} at the peak", bytes_text(limit) if limit else "", f"{len(profile)} ops in execution order")
    chart = area_chart(profile, shown, ends, f"memory over the step, {bytes_text(top)} at the peak")
    arguments = sum(tensor.local_bytes(plan.logical_mesh) for tensor in plan.inputs)
    words = [f"arguments {bytes_text(arguments)}"]
    if len(plan.op_table) > peak:
        origin = plan.op_table.origins[peak]
        words.append(f"the peak is at op {peak + 1}, {plan.op_table.operations[peak].primitive} ({origin.source or origin.name})")
    if limit:
        name = "budget" if plan.memory_limit_bytes else f"a {plan.topology} has"
        words.append(f"{name} {bytes_text(limit)}" + ("" if shown else ", which is above the chart"))
    return f'{chart}<p class="muted">{escape(", ".join(words))}</p>'
