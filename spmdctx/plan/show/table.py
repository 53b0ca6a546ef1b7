"""Shows the plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from spmdctx.ir.sharding import TensorSharding
from spmdctx.plan.data import PlanData
from spmdctx.plan.groups import CommunicationGroup, TensorGroup, by_cause, by_kind, group_tensors
from spmdctx.plan.summary.rates import limit_text, rates_text
from spmdctx.plan.summary.sentence import sentence_of
from spmdctx.wording import TIMES, bytes_text, counted, dtype_text, mesh_text, peak_text, place_text, seconds_text, share_text

MAX_CAUSES = 8
MAX_NOTES = 20
BAR_WIDTH = 16
AXIS_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red")


def plan_table(plan: PlanData) -> Group:
    """Returns the plan for a rich console, which adds colours."""
    return Group(*_sections(plan))


def _sections(plan: PlanData) -> Iterator[RenderableType]:
    yield _heading(plan)
    yield Padding(_summary(plan), (1, 0, 1, 2))
    yield _title("Inputs", counted(len(plan.inputs), "tensor"))
    yield _inputs(plan)
    yield _title("Communication", f"{counted(sum(row.repeats for row in plan.collectives), 'collective')} in a step")
    if plan.collectives:
        yield _communication(plan)
        yield _causes(plan)
    else:
        yield Padding("none", (0, 0, 1, 2))
    if any(one.bucket is not None for one in plan.gradients):
        yield _title("Gradients", f"{len(plan.gradients)} by index, in buckets")
        yield _gradients(plan)
    if plan.notes:
        yield _title("Notes", str(len(plan.notes)))
        yield _notes(plan)


def _heading(plan: PlanData) -> RenderableType:
    line = Text.assemble(("Plan  ", "bold"), (mesh_text(plan.logical_mesh), "bold cyan"), f"  on {plan.topology}")
    return Group(line, Text(sentence_of(plan) + ".", style="bold"), Rule(style="dim"))


def _title(name: str, detail: str) -> Text:
    return Text.assemble((name, "bold"), (f"  {detail}", "dim"))


def _summary(plan: PlanData) -> Table:
    cost = plan.cost
    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("mode", " · ".join(part for part in (plan.mode, plan.search_mode) if part))
    communication = seconds_text(cost.communication_s)
    if cost.hidden_communication_s:
        communication += f", {seconds_text(cost.hidden_communication_s)} of it hidden"
    share = share_text(cost.communication_s, cost.compute_s + cost.communication_s)
    detail = f"  compute {seconds_text(cost.compute_s)}, communication {communication}" + (f" ({share})" if share else "")
    grid.add_row("step", Text.assemble((seconds_text(cost.total_s), "bold"), detail))
    rates = rates_text(plan)
    if rates:
        grid.add_row("rate", rates)
    peak = peak_text(cost.memory_bytes, plan.safe_memory_bytes)
    grid.add_row("memory", Text.assemble((peak, "bold"), f"{limit_text(plan)}  peak per device"))
    grid.add_row("optimum", _certificate(plan))
    if plan.options:
        grid.add_row("options", ", ".join(f"{name}={value!r}" for name, value in plan.options))
    named = "".join(f"{name}, " for name in (plan.about.step, plan.about.model) if name)
    grid.add_row("program", f"{named}{counted(len(plan.ops), 'op')}, fingerprint {plan.fingerprint[:12]}")
    if plan.about.versions:
        grid.add_row("made by", ", ".join(f"{name} {version}" for name, version in plan.about.versions))
    return grid


def _certificate(plan: PlanData) -> str:
    if plan.lower_bound_s is None:
        return "no lower bound computed" + ("" if plan.certifier is None else "; plan.certify() computes one")
    gap = "" if plan.gap is None else f", gap {100 * plan.gap:.2f} %"
    return f"nothing below {seconds_text(plan.lower_bound_s)} in the declared space{gap}: {plan.declared_space}"


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=True, padding=(0, 1))
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    return table


def _inputs(plan: PlanData) -> Table:
    styles = {name: AXIS_STYLES[index % len(AXIS_STYLES)] for index, name in enumerate(plan.logical_mesh.names)}
    table = _table(("tensor", ""), ("", "right"), ("role", ""), ("shape", ""), ("split along", ""), ("per device", "right"))
    for group in group_tensors(plan.inputs):
        _add_input(table, group, plan, styles)
    total = sum(tensor.local_bytes(plan.logical_mesh) for tensor in plan.inputs)
    whole = sum(tensor.num_bytes for tensor in plan.inputs)
    table.add_section()
    table.add_row("all", "", "", "", Text(f"of {bytes_text(whole)}", style="dim"), Text(bytes_text(total), style="bold"))
    return table


def _add_input(table: Table, group: TensorGroup, plan: PlanData, styles: dict[str, str]) -> None:
    first = group.first
    local = sum(tensor.local_bytes(plan.logical_mesh) for tensor in group.tensors)
    count = f"{TIMES}{len(group.tensors)}" if len(group.tensors) > 1 else ""
    shape = Text.assemble((dtype_text(first.dtype), "dim"), "[", ", ".join(map(str, first.shape)), "]")
    table.add_row(Text(group.pattern), count, first.role.value, shape, _split(first.sharding, styles), bytes_text(local))


def _split(sharding: TensorSharding, styles: dict[str, str]) -> Text:
    if not any(sharding):
        return Text("whole", style="dim")
    text = Text("[")
    for dim, axes in enumerate(sharding):
        text.append(", " if dim else "")
        for position, name in enumerate(axes):
            text.append("+" if position else "").append(name, style=styles.get(name, ""))
        if not axes:
            text.append("-", style="dim")
    return text.append("]")


def _communication(plan: PlanData) -> Table:
    table = _table(("collective", ""), ("over", ""), ("count", "right"), ("per device", "right"), ("time", "right"), ("", ""))
    groups = by_kind(plan.collectives)
    longest = groups[0].time_s
    for group in groups:
        table.add_row(
            group.kind,
            "+".join(group.axes),
            str(group.count),
            bytes_text(group.payload_bytes),
            seconds_text(group.time_s),
            _bar(group, longest),
        )
    return table


def _bar(group: CommunicationGroup, longest: float) -> Text:
    length = round(BAR_WIDTH * group.time_s / longest) if longest > 0 else 0
    return Text("█" * max(1, length), style="cyan")


def _causes(plan: PlanData) -> RenderableType:
    groups = by_cause(plan.collectives)
    table = _table(("dearest causes", ""), ("collective", ""), ("over", ""), ("count", "right"), ("time", "right"), ("where", ""))
    for group in groups[:MAX_CAUSES]:
        table.add_row(
            Text(group.cause),
            group.kind,
            "+".join(group.axes),
            str(group.count),
            seconds_text(group.time_s),
            Text(place_text(group.source)),
        )
    rest = groups[MAX_CAUSES:]
    if rest:
        count, time_s = sum(group.count for group in rest), sum(group.time_s for group in rest)
        table.add_row(Text(f"{len(rest)} more", style="dim"), "", "", str(count), seconds_text(time_s), "")
    return table


def _gradients(plan: PlanData) -> Table:
    table = _table(("bucket", "right"), ("index", "right"), ("gradient", ""))
    last = None
    for index, one in enumerate(plan.gradients):
        table.add_row("" if one.bucket == last else str(one.bucket), str(index), Text(one.path))
        last = one.bucket
    return table


def _notes(plan: PlanData) -> RenderableType:
    rows = _marked(plan.notes[:MAX_NOTES])
    if len(plan.notes) > MAX_NOTES:
        rows.add_row("", Text(f"and {len(plan.notes) - MAX_NOTES} more, in plan.notes", style="dim"))
    return Padding(rows, (1, 0, 0, 2))


def _marked(lines: Sequence[str]) -> Table:
    grid = Table.grid(padding=(0, 1))
    for line in lines:
        grid.add_row(Text("·", style="dim"), Text(line))
    return grid
