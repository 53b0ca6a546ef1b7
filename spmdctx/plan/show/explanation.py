"""Shows an explanation as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spmdctx.ir.mesh import axes_of
from spmdctx.plan.data import PlanData, Reshard
from spmdctx.plan.explain import ExplanationData, Instead, OpExplanation, TensorExplanation, weighs
from spmdctx.plan.groups import by_cause
from spmdctx.plan.show.plain import explanation_figures
from spmdctx.wording import TIMES, bytes_text, counted, place_text, seconds_text, split_text, tensor_text
from spmdctx.wording.reports import Report

MAX_USES = 6
MAX_ALTERNATIVES = 4
MAX_OPS = 12


@dataclass(frozen=True, slots=True)
class Explanation(ExplanationData, Report):
    """The answer of `Plan.explain`; it prints itself."""

    kind = "explanation"

    def _figures(self) -> dict[str, Any]:
        return explanation_figures(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(explanation: ExplanationData) -> Iterator[str]:
    if not explanation:
        yield f"Nothing in the plan matches {explanation.pattern!r}."
        some = [tensor.path for tensor in explanation.plan.inputs[:3]]
        yield f"  Patterns are parts of paths such as {', '.join(some)}, globs, op names or source lines."
        return
    for one in explanation.tensors:
        yield from _tensor_lines(one, explanation.plan)
    if explanation.op_kinds:
        yield from _op_lines(explanation.op_kinds, explanation.plan)
        yield ""
    rows = [row for tensor in explanation.tensors for row in tensor.alternatives]
    rows += [row for kind in explanation.op_kinds for row in kind.alternatives]
    if rows and not weighs(explanation.plan):
        made_by = explanation.plan.search_mode or explanation.plan.mode
        yield f"{made_by} weighs no alternatives: auto_parallel by dynamic_programming would take what is better"
        yield ""
    if explanation.collectives:
        yield "communication at the same places in the program"
        for group in by_cause(explanation.collectives)[:MAX_USES]:
            payload = f"{group.count} {TIMES} {group.kind} over {'+'.join(group.axes)}, {bytes_text(group.payload_bytes)}"
            yield f"  {payload}, {seconds_text(group.time_s)}: {group.cause}{_at(group.source)}"


def _tensor_lines(one: TensorExplanation, plan: PlanData) -> Iterator[str]:
    count = f"  {TIMES}{len(one.paths)}" if len(one.paths) > 1 else ""
    yield f"{one.pattern}{count}"
    local = bytes_text(one.tensor.local_bytes(plan.logical_mesh))
    kind = tensor_text(one.tensor.shape, one.tensor.dtype)
    yield f"  chosen    {split_text(one.tensor.sharding)} for {kind}, {local} of {bytes_text(one.tensor.num_bytes)} per device"
    for label, text in story(one, plan):
        yield f"  {label:<9} {text}"
    yield from _alternative_lines(one, plan)
    yield ""


def story(one: TensorExplanation, plan: PlanData) -> Iterator[tuple[str, str]]:
    """Tells why a tensor is split as it is, who reads and writes it, and what moves, as labels and texts."""
    yield "because", one.tensor.reason or f"{plan.assignment.mode} found it"
    for label, writes in (("read", False), ("written", True)):
        uses = [use for use in one.uses if use.writes is writes]
        for use in uses[:MAX_USES]:
            cast = ", after a cast" if use.cast else ""
            yield label, f"as {split_text(use.needs)} by {use.primitive}{_at(use.source)}{cast}"
        if len(uses) > MAX_USES:
            yield "", f"and by {len(uses) - MAX_USES} more"
    for row in _distinct(one.reshards):
        move = f"{split_text(row.source_sharding)} to {split_text(row.target_sharding)}"
        yield "moves", f"{move} for {row.op}{_at(row.location)}"
    if not one.reshards:
        yield "moves", "nothing: every op takes it as it is stored"


def _alternative_lines(one: TensorExplanation, plan: PlanData) -> Iterator[str]:
    names = [split_text(row.sharding) for row in one.alternatives]
    several = len(one.paths) > 1
    if one.whole_step:
        yield from _runners_up(one.alternatives, names, several, plan)
        if not one.alternatives:
            yield "  runner-up none: no other sharding is free and divides"
        return
    for position, (row, name) in enumerate(zip(one.alternatives[:MAX_ALTERNATIVES], names, strict=False)):
        yield f"  {'' if position else 'instead':<9} {name}: {_price_text(row, several)}"
    if one.alternatives:
        used = axes_of(one.tensor.sharding)
        rest = "" if used else ", nor is the gain of splitting other ops along with it"
        yield f"            (each by itself, with all else as planned: what moves along is not counted{rest})"


def _price_text(row: Instead, several: bool) -> str:
    time = "as fast" if row.extra_s == 0 else f"{seconds_text(abs(row.extra_s))} {'slower' if row.extra_s > 0 else 'faster'}"
    memory = "as much memory" if row.extra_bytes == 0 else f"{bytes_text(abs(row.extra_bytes))} {'more' if row.extra_bytes > 0 else 'less'}"
    return f"{time}, {memory} per device{' each' if several else ''}"


def _runners_up(rows: Sequence[Instead], names: Sequence[str], several: bool, plan: PlanData) -> Iterator[str]:
    """Gives the lines of alternatives priced as whole steps, with what would make them win, or what was tried if nothing does.

    Where none was weighed, none wins: the lines say when an alternative would be faster.
    """
    shown = rows[:MAX_ALTERNATIVES]
    last, (wins, nor) = "", ("it wins", ", nor any budget") if weighs(plan) else ("faster", "")
    for row, name in zip(shown, names, strict=False):
        label = "runner-up" if row.extra_s >= 0 else "too large" if row.flips else "better"
        along = f"; {counted(row.num_moved, 'other tensor')} {'moves' if row.num_moved == 1 else 'move'} along" if row.num_moved else ""
        permuted = ", the axes in other places" if row.same_slices else ""
        outside = "; not in the space that was searched" if row.outside else ""
        yield f"  {'' if label == last else label:<9} {name}{permuted}: {_price_text(row, several)}{along}{outside}"
        for position, text in enumerate(row.flips):
            yield f"  {'' if position else wins:<9} {text}"
        last = "" if row.flips else label
    if any(row.extra_s > 0 for row in shown) and not any(row.flips for row in shown):
        yield f"  {wins:<9} nowhere: not with links 64 times as fast or slow, nor a batch 16 times as large or small{nor}"


def _at(source: str) -> str:
    """Returns a place in brackets; nothing for what no line of the user's makes."""
    return f" ({place_text(source)})" if source else ""


def _distinct(reshards: Sequence[Reshard]) -> list[Reshard]:
    seen = {(row.source_sharding, row.target_sharding, row.op, row.location): row for row in reversed(reshards)}
    return list(reversed(seen.values()))[:MAX_USES]


def _op_lines(kinds: Sequence[OpExplanation], plan: PlanData) -> Iterator[str]:
    for kind in kinds[:MAX_OPS]:
        op = kind.op
        yield f"{op.primitive}  {TIMES}{kind.num_runs} {_at(op.source)}"
        yield f"  split     {op.sharding or 'nothing: every device does all of it'}"
        yield f"  rule      {op.rule}"
        names = [f"{row.split}, result {split_text(row.sharding)}" for row in kind.alternatives]
        yield from _runners_up(kind.alternatives, names, kind.num_runs > 1, plan)
        if kind.missing:
            yield f"  runner-up {kind.missing}"
    if len(kinds) > MAX_OPS:
        yield f"and {counted(len(kinds) - MAX_OPS, 'more kind')} of op"
