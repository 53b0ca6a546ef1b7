"""Chooses the number of stages of a step: each count is planned, and 1 is the step without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from spmdctx.errors import ContextError, InfeasibleError, SpmdctxError, StrategyError, UnsupportedError
from spmdctx.gradients.capture import capture_step
from spmdctx.pipeline.capture.carrier import PipelinedStep, capture_pipelined
from spmdctx.pipeline.search.counts import Candidate, best_of, choice_notes, stage_counts
from spmdctx.pipeline.stages.memory import memory_of
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.step.entry import Entry
from spmdctx.step.pipelined.entry import PipelinedEntry
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.environment import Environment

_NOT_HERE = (ContextError, InfeasibleError, StrategyError, UnsupportedError)
"""What rules a number of stages out, and not the step."""


class PlannedEntry(Entry):
    """An entry whose plan is there already, with further notes."""

    def __init__(self, captured: Captured, environment: Environment, notes: Sequence[str], planned: Any) -> None:
        super().__init__(captured, environment)
        self._found = replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, *notes)))

    @cached_property
    def planned(self) -> Any:
        """The plan with what lowering needs."""
        return self._found


def chosen_entry(target: Target, call: Call, static: Static, around: Environment, notes: Sequence[str]) -> Entry:
    """Plans a step on each number of stages from 1 to `pipeline_stages`, and returns the entry of the fastest one that fits.

    Raises:
        InfeasibleError: no number of stages fits.
        StrategyError: a loss that cannot be split.
    """
    settings = around.settings
    most = settings.context.pipeline_stages
    refused: dict[int, SpmdctxError] = {}
    pipelines: dict[int, PipelinedEntry] = {}
    try:
        step: PipelinedStep | None = capture_pipelined(target, call, static, _of(around, 1).settings)
    except _NOT_HERE as error:
        step, refused[most] = None, error
    for count in stage_counts(settings.num_devices, most, step.loss.num_micro if step is not None else 1):
        if step is not None and count > 1:
            entry = PipelinedEntry(step, _of(around, count), notes)
            try:
                entry.pipeline  # noqa: B018  # planned here, so that a count that does not fit is left out
            except _NOT_HERE as error:
                refused[count] = error
                continue
            pipelines[count] = entry
    single = Entry(capture_step(target, call, static, _of(around, 1).settings), _of(around, 1), notes)
    candidates = [_of_pipeline(count, entry.pipeline) for count, entry in pipelines.items()]
    try:
        cost = single.planned.plan.cost
        candidates.append(Candidate(1, cost.total_s, cost.total_s - cost.compute_s, cost.memory_bytes))
    except InfeasibleError as error:
        if not candidates:
            raise
        refused[1] = error
    room = settings.memory_bytes or settings.topology.memory_bytes
    chosen = best_of(candidates, room)
    reasons = {count: str(error.args[0]).splitlines()[0] for count, error in refused.items()}
    more = choice_notes(chosen, candidates, reasons, most, room)
    if chosen.stages == 1:
        return PlannedEntry(single.captured, single.environment, more, single.planned)
    pipelines[chosen.stages].pipeline.notes.extend(more)
    return pipelines[chosen.stages]


def _of(around: Environment, count: int) -> Environment:
    """Returns what surrounds a step on so many stages."""
    context = around.settings.context.with_checked({"pipeline_stages": count, "auto_pipeline": False})
    return replace(around, settings=replace(around.settings, context=context))


def _of_pipeline(count: int, pipeline: PlannedPipeline) -> Candidate:
    """Returns a planned pipeline as a candidate; the seconds in which it waits for links are as large a part as in its tasks."""
    costs = [task.planned.plan.cost for chunk in pipeline.planned for task in chunk.tasks.values()]
    waiting = sum(cost.total_s - cost.compute_s for cost in costs) / max(sum(cost.total_s for cost in costs), 1e-300)
    return Candidate(count, pipeline.total_s, pipeline.total_s * waiting, max(own.peak_bytes for own in memory_of(pipeline)))
