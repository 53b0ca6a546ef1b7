"""Shows the plan as one self-contained page, for a notebook cell or a file of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from spmdctx.ir.graph import Role
from spmdctx.ir.sharding import AxisNames
from spmdctx.plan.data import PlanData
from spmdctx.plan.explain import TensorExplanation, described_tensors
from spmdctx.plan.groups import CommunicationGroup, TensorGroup, by_cause, by_kind, group_tensors
from spmdctx.plan.show.explanation import story
from spmdctx.plan.show.page_charts import memory_chart, time_bands
from spmdctx.plan.summary.rates import device_bytes, limit_text, rates_text
from spmdctx.plan.summary.sentence import sentence_of
from spmdctx.wording import TIMES, bytes_text, counted, dtype_text, mesh_text, peak_text, place_text, seconds_text, share_text

MAX_CELLS = 256
MAX_MEMBERS = 400
MAX_CAUSES = 12
MAX_OP_KINDS = 20
NUM_COLOURS = 6

DOCUMENT_STYLE = (
    ":root{color-scheme:light dark}body{margin:0;background:light-dark(#fff,#14181f)}"
    ".spmdctx-plan{max-width:1080px;margin:0 auto;padding:32px 24px 64px}"
)


def plan_document(plan: PlanData) -> str:
    """Returns a whole HTML document."""
    return document(f"Plan: {mesh_text(plan.logical_mesh)}", plan_page(plan))


def document(title: str, page: str) -> str:
    """Returns a page as a whole HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{DOCUMENT_STYLE}</style></head>"
        f"<body>\n{page}\n</body></html>\n"
    )


def plan_page(plan: PlanData) -> str:
    """Returns the page as a fragment; its style reaches nothing outside."""
    parts = [
        _header(plan),
        _tiles(plan),
        _time(plan),
        _memory(plan),
        _mesh(plan),
        _inputs(plan),
        _ops(plan),
        _communication(plan),
        _notes(plan),
    ]
    return styled("".join(parts))


def styled(body: str) -> str:
    """Returns a fragment with the style of pages, which reaches nothing outside."""
    return f'<div class="spmdctx-plan"><style>{_style()}</style>{body}</div>'


@cache
def _style() -> str:
    return files("spmdctx.plan").joinpath("page.css").read_text(encoding="utf-8")


def _colours(plan: PlanData) -> dict[str, str]:
    return {name: f"axis{index % NUM_COLOURS}" for index, name in enumerate(plan.logical_mesh.names)}


def _chip(name: str, colours: dict[str, str]) -> str:
    return f'<span class="chip {colours.get(name, "")}">{escape(name)}</span>'


def _chips(axes: AxisNames, colours: dict[str, str]) -> str:
    return "".join(_chip(name, colours) for name in axes)


def section(title: str, detail: str, body: str) -> str:
    """Returns a part of a page under a heading, with a few words beside it."""
    return f"<section><h2>{escape(title)} <small>{escape(detail)}</small></h2>{body}</section>"


def _header(plan: PlanData) -> str:
    words = [plan.mode, plan.search_mode, plan.topology, counted(plan.logical_mesh.num_devices, "device"), counted(len(plan.ops), "op")]
    tags = "".join(f"<li>{escape(word)}</li>" for word in words if word)
    options = "".join(f"<li><code>{escape(name)}={escape(repr(value))}</code></li>" for name, value in plan.options)
    about = plan.about
    named = " · ".join(name for name in (about.step, about.model) if name)
    made = ", ".join(f"{name} {version}" for name, version in about.versions)
    below = "".join(f'<p class="muted">{escape(text)}</p>' for text in (named, made and f"Made by {made}") if text)
    what = f"<p><strong>{escape(sentence_of(plan))}.</strong></p>{below}"
    return f'<header><h1>{escape(mesh_text(plan.logical_mesh))}</h1>{what}<ul class="tags">{tags}{options}</ul></header>'


def _tiles(plan: PlanData) -> str:
    cost = plan.cost
    whole = cost.compute_s + cost.communication_s
    limit = plan.memory_limit_bytes or device_bytes(plan)
    rates = rates_text(plan)
    tiles = [
        tile("step", seconds_text(cost.total_s), rates or "predicted"),
        tile("compute", seconds_text(cost.compute_s), share_text(cost.compute_s, whole), cost.compute_s / whole if whole else 0),
        tile(
            "communication",
            seconds_text(cost.communication_s),
            share_text(cost.communication_s, whole),
            cost.communication_s / whole if whole else 0,
        ),
        tile(
            "memory per device",
            bytes_text(cost.memory_bytes),
            _room_text(plan),
            cost.memory_bytes / limit if limit else None,
        ),
    ]
    if plan.lower_bound_s is not None:
        gap = "" if plan.gap is None else f"gap {100 * plan.gap:.2f} %"
        tiles.append(tile("lower bound", seconds_text(plan.lower_bound_s), f"{gap} in {plan.declared_space}".strip()))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _room_text(plan: PlanData) -> str:
    """Returns the safe end of a peak, and what it is a part of."""
    safe = f"likely; {bytes_text(plan.safe_memory_bytes)} is safe" if plan.safe_memory_bytes > plan.cost.memory_bytes else ""
    return ", ".join(filter(None, (safe, limit_text(plan).strip()))) or "peak"


def tile(name: str, value: str, detail: str, filled: float | None = None) -> str:
    """Returns one figure of a page, with a bar that is `filled` to a share, if there is one."""
    over = " over" if filled is not None and filled > 1 else ""
    bar = "" if filled is None else f'<i class="meter{over}"><b style="width:{100 * min(filled, 1):.1f}%"></b></i>'
    return f'<div class="tile"><span>{escape(name)}</span><strong>{escape(value)}</strong><small>{escape(detail)}</small>{bar}</div>'


def _time(plan: PlanData) -> str:
    bands = time_bands(plan)
    return section("Where the time goes", f"{seconds_text(plan.cost.total_s)} a step", bands) if bands else ""


def _memory(plan: PlanData) -> str:
    chart, peak = memory_chart(plan), peak_text(plan.cost.memory_bytes, plan.safe_memory_bytes)
    return section("Memory over the step", f"{peak} at the peak, per device", chart) if chart else ""


def _mesh(plan: PlanData) -> str:
    """Draws the devices as a grid: the last axis to the right, the others downwards."""
    mesh, colours = plan.logical_mesh, _colours(plan)
    if mesh.num_devices > MAX_CELLS or mesh.num_devices == 1:
        return ""
    columns = mesh.shape[-1] if len(mesh.axes) > 1 else min(mesh.num_devices, 32)
    cells = "".join(f"<span>{device}</span>" for device in range(mesh.num_devices))
    across = _axis_label(mesh.axes[-1], colours, "\N{RIGHTWARDS ARROW}")
    down = "".join(_axis_label(axis, colours, "\N{DOWNWARDS ARROW}") for axis in mesh.axes[:-1])
    grid = f'<div class="mesh" style="grid-template-columns:repeat({columns},34px)">{cells}</div>'
    return section("Mesh", counted(mesh.num_devices, "device"), f'<div class="axes">{down}{across}</div><div class="scroll">{grid}</div>')


def _axis_label(axis: tuple[str, int], colours: dict[str, str], arrow: str) -> str:
    return f"<span>{arrow} {_chip(axis[0], colours)} {axis[1]}</span>"


def _inputs(plan: PlanData) -> str:
    mesh = plan.logical_mesh
    told = {one.paths[0]: one for one in described_tensors(plan)}
    groups = group_tensors(plan.inputs)
    blocks = []
    for role in Role:
        own = [group for group in groups if group.first.role is role]
        if own:
            local = sum(tensor.local_bytes(mesh) for group in own for tensor in group.tensors)
            whole = sum(tensor.num_bytes for group in own for tensor in group.tensors)
            count = sum(len(group.tensors) for group in own)
            head = f"{escape(role.value)} <small>{counted(count, 'tensor')}, {bytes_text(whole)}, {bytes_text(local)} per device</small>"
            rows = "".join(_input_row(group, plan, told[group.first.path]) for group in own)
            blocks.append(f'<details open><summary>{head}</summary><div class="grid inputs">{_INPUT_HEAD}{rows}</div></details>')
    return section("Inputs", counted(len(plan.inputs), "tensor"), "".join(blocks) or "<p>none</p>")


_INPUT_HEAD = (
    '<div class="row head"><span>tensor</span><span>split</span><span class="num">whole</span><span class="num">per device</span></div>'
)


def _input_row(group: TensorGroup, plan: PlanData, told: TensorExplanation) -> str:
    """Draws a row that opens: why the input is split so, who reads and writes it, what moves, and the paths that it stands for."""
    first, mesh = group.first, plan.logical_mesh
    shape = _shape(first.shape, first.sharding, first.dtype, plan)
    whole = bytes_text(sum(tensor.num_bytes for tensor in group.tensors))
    local = bytes_text(sum(tensor.local_bytes(mesh) for tensor in group.tensors))
    count = f"{TIMES}{len(group.tensors)}" if len(group.tensors) > 1 else ""
    name = f'<code>{escape(group.pattern)}</code> <em class="count">{count}</em>'
    cells = f'<span>{shape}</span><span class="num">{whole}</span><span class="num">{local}</span>'
    lines = "".join(f"<li><b>{label}</b> {escape(text)}</li>" for label, text in story(told, plan))
    members = "".join(f"<li><code>{escape(tensor.path)}</code></li>" for tensor in group.tensors[:MAX_MEMBERS])
    if len(group.tensors) > MAX_MEMBERS:
        members += f"<li>and {len(group.tensors) - MAX_MEMBERS} more</li>"
    paths = f'<ul class="paths">{members}</ul>' if count else ""
    return f'<details class="fold"><summary class="row"><span>{name}</span>{cells}</summary><ul class="story">{lines}</ul>{paths}</details>'


def _shape(shape: Sequence[int], sharding: Iterable[AxisNames], dtype: str, plan: PlanData) -> str:
    """Draws one box per dimension, in the colour of its axis if it is split."""
    colours = _colours(plan)
    dims = []
    for size, axes in zip(shape, sharding, strict=True):
        colour = colours[axes[0]] if axes else ""
        split = f"<sub>{escape('+'.join(axes))}</sub>" if axes else ""
        dims.append(f'<b class="dim {colour}">{size}{split}</b>')
    return f'<i class="dtype">{escape(dtype_text(dtype))}</i>' + ("".join(dims) or '<b class="dim">scalar</b>')


def _ops(plan: PlanData) -> str:
    """Lists ops that do the same work in the same way, the heaviest first."""
    kinds: dict[tuple[int, tuple[AxisNames, ...]], list[int]] = {}
    for index, (op, choice) in enumerate(zip(plan.op_table.operations, plan.op_table.choices, strict=True)):
        if op.flops:
            kinds.setdefault((id(op.rule), choice.axes), []).append(index)
    operations = plan.op_table.operations
    weights = {key: sum(operations[index].flops * operations[index].repeats for index in rows) for key, rows in kinds.items()}
    heaviest = sorted(kinds, key=lambda key: -weights[key])[:MAX_OP_KINDS]
    total = sum(weights.values())
    if not total:
        return ""
    rows = "".join(_op_row(plan, kinds[key], weights[key] / total) for key in heaviest)
    head = '<div class="row head"><span>op</span><span>rule and axes</span><span class="num">ops</span><span class="num">work</span></div>'
    body = f'<details><summary>the {len(heaviest)} heaviest kinds of op</summary><div class="grid ops">{head}{rows}</div></details>'
    return section("Computation", f"{seconds_text(plan.cost.compute_s)} in {counted(len(plan.ops), 'op')}", body)


def _op_row(plan: PlanData, indices: list[int], share: float) -> str:
    planned = plan.ops[indices[0]]
    colours = _colours(plan)
    axes = plan.op_table.choices[indices[0]].axes
    chips = (
        "".join(dict.fromkeys(_chip(name, colours) for own in axes for name in own)) or '<span class="muted">whole on every device</span>'
    )
    slices = math.prod(plan.logical_mesh.num_slices(own) for own in axes)
    detail = f"{escape(planned.sharding)}, 1/{slices} each" if slices > 1 else ""
    return (
        f'<div class="row"><span><code>{escape(planned.primitive)}</code><br><small>{escape(place_text(planned.source))}</small></span>'
        f'<span><code class="rule">{escape(str(planned.rule))}</code><br>{chips} <small>{detail}</small></span>'
        f'<span class="num">{sum(plan.op_table.operations[index].repeats for index in indices)}</span>'
        f'<span class="num">{100 * share:.1f} %</span></div>'
    )


def _communication(plan: PlanData) -> str:
    kinds, causes = by_kind(plan.collectives), by_cause(plan.collectives)
    if not kinds:
        return section("Communication", "", "<p>none</p>")
    total = sum(group.time_s for group in kinds) or 1.0
    colours = _colours(plan)
    bands = "".join(
        f'<b class="{group.kind}" style="flex:{max(group.time_s / total, 0.004):.4f}" title="{_tooltip(group)}"></b>' for group in kinds
    )
    legend = "".join(
        f'<li><i class="key {group.kind}"></i>{group.kind} {_chips(group.axes, colours)} '
        f"<small>{group.count} {TIMES}, {bytes_text(group.payload_bytes)}, {seconds_text(group.time_s)}</small></li>"
        for group in kinds
    )
    longest = causes[0].time_s or 1.0
    head = '<div class="row head"><span>cause</span><span>collective</span><span class="num">bytes</span><span>time</span></div>'
    rows = [_cause_row(group, longest, colours) for group in causes]
    rest = f'<details class="fold more"><summary>{len(rows) - MAX_CAUSES} more</summary>{"".join(rows[MAX_CAUSES:])}</details>'
    table = f'<div class="grid causes">{head}{"".join(rows[:MAX_CAUSES])}{rest if len(rows) > MAX_CAUSES else ""}</div>'
    count = sum(group.count for group in kinds)
    detail = f"{counted(count, 'collective')}, {seconds_text(plan.cost.communication_s)} in a step"
    return section("Communication", detail, f'<div class="bands">{bands}</div><ul class="legend">{legend}</ul>{table}')


def _tooltip(group: CommunicationGroup) -> str:
    return escape(f"{group.kind} over {'+'.join(group.axes)}: {seconds_text(group.time_s)}")


def _cause_row(group: CommunicationGroup, longest: float, colours: dict[str, str]) -> str:
    width = 100 * group.time_s / longest
    return (
        f'<div class="row"><span>{escape(group.cause)}<br><small>{escape(place_text(group.source))}</small></span>'
        f"<span>{group.kind} {_chips(group.axes, colours)}</span>"
        f'<span class="num">{bytes_text(group.payload_bytes)}<br><small>{group.count} {TIMES}</small></span>'
        f'<span class="bar"><i class="{group.kind}" style="width:{width:.1f}%"></i>{seconds_text(group.time_s)}</span></div>'
    )


def _notes(plan: PlanData) -> str:
    if not plan.notes:
        return ""
    return section(
        "Notes", str(len(plan.notes)), "<ul class='notes'>" + "".join(f"<li>{escape(note)}</li>" for note in plan.notes) + "</ul>"
    )
