"""Pins of the cut: the equations that marks of the user put on a stage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.errors import StrategyError
from spmdctx.pipeline.cut.choose import Range
from spmdctx.rules.control_flow import bodies_of, opened
from spmdctx.trace.build.origins import source_line

_SCOPE = "spmdctx_pipeline_stage_"
_STAGE = re.compile(_SCOPE + r"(\d+)")


def scope_of(stage: int) -> str:
    """Returns the name of the scope in which a marked call is traced."""
    return f"{_SCOPE}{stage}"


class _Run(NamedTuple):
    """Neighbors on a line that are marked for one stage, by the numbers of the first and the last one."""

    stage: int
    first: int
    last: int


def marks_of(eqns: Sequence[Any]) -> dict[int, int]:
    """Returns the stage of each marked equation, by the equation's id.

    Raises:
        StrategyError: one equation, such as a loop, holds marks of several stages.
    """
    found = {}
    for eqn in eqns:
        stages = dict(_stages(eqn, None))
        if len(stages) > 1:
            raise StrategyError(
                f"One equation, {eqn.primitive.name}, holds parts that are marked for stages {', '.join(map(str, sorted(stages)))}.",
                where=source_line(eqn.source_info),
                got="; ".join(f"stage {stage} at {source_line(inner.source_info)}" for stage, inner in stages.items()),
                fix="mark the looped function as a whole, or make one of each part",
            )
        found.update({id(eqn): stage for stage in stages})
    return found


def without_marks(closed: jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
    """Returns a program without the scopes of marks, also in its bodies."""
    return jexc.ClosedJaxpr(_unmarked(closed.jaxpr), closed.consts)


def _unmarked(body: Any) -> Any:
    """Returns a program, a tuple of programs, or any other parameter of an equation, without the scopes of marks."""
    if isinstance(body, jexc.ClosedJaxpr):
        return without_marks(body)
    if isinstance(body, tuple) and any(isinstance(one, jexc.ClosedJaxpr | jexc.Jaxpr) for one in body):
        return tuple(map(_unmarked, body))
    if not isinstance(body, jexc.Jaxpr):
        return body
    eqns = []
    for eqn in body.eqns:
        info, params = eqn.source_info, eqn.params
        kept = tuple(part for part in info.name_stack.stack if _STAGE.fullmatch(getattr(part, "name", "")) is None)
        if bodies_of(params):
            params = {name: _unmarked(value) for name, value in params.items()}
        eqns.append(eqn.replace(params=params, source_info=info.replace(name_stack=replace(info.name_stack, stack=kept))))
    return body.replace(eqns=eqns)


def _stages(eqn: Any, around: int | None) -> Iterator[tuple[int, Any]]:
    """Yields the stages for which an equation and those of its bodies are marked, the innermost mark of each."""
    marks = _STAGE.findall(str(eqn.source_info.name_stack))
    own = int(marks[-1]) if marks else around
    bodies = bodies_of(eqn.params)
    if own is not None and not bodies:
        yield own, eqn
    for body in bodies:
        for inner in opened(body).eqns:
            yield from _stages(inner, own)


def pinned_ranges(
    eqns: Sequence[Any], marks: dict[int, int], stage_of: Sequence[int], costs: Sequence[float], where: str
) -> list[Range] | None:
    """Returns where each cut may lie so that every marked equation is on its stage; None if nothing is marked.

    Args:
        eqns: of the line.
        marks: the stage of each marked equation, by its id.
        stage_of: the stage of each chunk.
        costs: of each equation; they decide between several chunks of a stage.
        where: the source line of the loss.

    Raises:
        StrategyError: a mark names no stage, or the marks would need a hop backwards, or they leave a chunk no equation.
    """
    runs = _runs(eqns, marks)
    if not runs:
        return None
    num_stages, num_chunks = max(stage_of) + 1, len(stage_of)
    for run in runs:
        if run.stage >= num_stages:
            raise StrategyError(
                f"A part of the loss is marked for stage {run.stage}.",
                where=source_line(eqns[run.first].source_info),
                need=f"a stage from 0 to {num_stages - 1}, as pipeline_stages is {num_stages}",
            )
    chunks = _chunks(eqns, runs, stage_of, costs)
    _check_room(eqns, runs, chunks, num_chunks, where)
    found = []
    for cut in range(num_chunks - 1):
        first = max((run.last for run, own in zip(runs, chunks, strict=True) if own[-1] <= cut), default=cut)
        last = min((run.first - 1 for run, own in zip(runs, chunks, strict=True) if own[0] > cut), default=len(eqns) - 2)
        found.append(Range(max(first, cut), min(last, len(eqns) - num_chunks + cut)))
    return found


def _runs(eqns: Sequence[Any], marks: dict[int, int]) -> list[_Run]:
    runs: list[_Run] = []
    for place, eqn in enumerate(eqns):
        stage = marks.get(id(eqn))
        if stage is None:
            continue
        if runs and runs[-1].stage == stage and runs[-1].last == place - 1:
            runs[-1] = runs[-1]._replace(last=place)
        else:
            runs.append(_Run(stage, place, place))
    return runs


def _chunks(eqns: Sequence[Any], runs: Sequence[_Run], stage_of: Sequence[int], costs: Sequence[float]) -> list[range]:
    """Returns the chunks in which each run may lie: neighbors on its stage, of several such groups the one nearest to its place."""
    starts = [chunk for chunk in range(len(stage_of)) if chunk == 0 or stage_of[chunk] != stage_of[chunk - 1]]
    groups = [range(first, last) for first, last in pairwise([*starts, len(stage_of)])]
    latest = [len(groups) - 1]
    for run in reversed(runs):
        latest.append(max((number for number in range(latest[-1] + 1) if stage_of[groups[number][0]] == run.stage), default=-1))
    latest = latest[:0:-1]
    ends = [0.0, *accumulate(costs)]
    found: list[int] = []
    for number, run in enumerate(runs):
        possible = [group for group in range(found[-1] if found else 0, len(groups)) if stage_of[groups[group][0]] == run.stage]
        if not possible:
            _refuse_hop(eqns, runs, number, stage_of)
        middle = (ends[run.first] + ends[run.last + 1]) / 2 / (ends[-1] or 1.0) * len(stage_of)
        within = [group for group in possible if group <= latest[number]] or possible[:1]
        found.append(min(within, key=lambda group: abs((groups[group].start + groups[group].stop) / 2 - middle)))
    return [groups[group] for group in found]


def _refuse_hop(eqns: Sequence[Any], runs: Sequence[_Run], number: int, stage_of: Sequence[int]) -> None:
    run, before = runs[number], runs[number - 1]
    raise StrategyError(
        "The marks of pipeline stages would need a hop backwards.",
        got=f"stage {before.stage} at {source_line(eqns[before.last].source_info)}, then stage {run.stage} at "
        f"{source_line(eqns[run.first].source_info)}",
        need=f"marks in the order in which the loss runs, whose chunks lie on stages {', '.join(map(str, stage_of))}",
        fix="mark what runs later for the same or a later stage",
    )


def _check_room(eqns: Sequence[Any], runs: Sequence[_Run], chunks: Sequence[range], num_chunks: int, where: str) -> None:
    """Refuses marks between which there are fewer equations than chunks."""
    before, end = -1, -1
    for run, own in zip([*runs, None], [*chunks, range(num_chunks, num_chunks)], strict=True):
        first = len(eqns) if run is None else run.first
        if own.start - before - 1 > first - end - 1:
            raise StrategyError(
                f"The marks of pipeline stages leave nothing to chunks {', '.join(map(str, range(before + 1, own.start)))}.",
                where=where,
                got="marks at " + ", ".join(dict.fromkeys(source_line(eqns[one.first].source_info) for one in runs)),
                fix="mark a part of the loss for each stage, or use fewer pipeline stages",
            )
        before, end = own.stop - 1, end if run is None else run.last
