"""Chooses the number of stages and the schedule of a step: each is planned, and 1 stage is the step without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spmdctx.errors import InfeasibleError
from spmdctx.gradients.capture import capture_step
from spmdctx.pipeline.capture.carrier import PipelinedStep, capture_pipelined
from spmdctx.pipeline.schedule.named import Scheduler
from spmdctx.pipeline.search.counts import Candidate, Choices, best_of, choice_notes, stage_counts
from spmdctx.pipeline.search.fitting import fit_promising
from spmdctx.pipeline.search.plan import PipelinePlanner, Unlimited
from spmdctx.pipeline.search.proven import choice_note
from spmdctx.pipeline.search.schedules import (
    DEEPER,
    EVERY,
    INTERLEAVED,
    NOT_HERE,
    PLAIN,
    Tried,
    leave_deeper,
    plan_deeper,
    plan_schedules,
    reason_of,
    shown,
    tried,
)
from spmdctx.pipeline.search.suggestion import estimates
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.step.entry import Entry
from spmdctx.step.pipelined.entry import PipelinedEntry
from spmdctx.step.pipelined.insight import with_budget
from spmdctx.step.pipelined.scheduler import scheduler_of, sets_schedule
from spmdctx.step.planning.planner import plan_program
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.environment import Environment
from spmdctx.wording import bytes_text, counted


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

    Where the user sets no schedule, those that could be the fastest are planned, too.

    Raises:
        InfeasibleError: no number of stages fits.
        StrategyError: a loss that cannot be split.
    """
    alone = _of(around, 1)
    captured = capture_step(target, call, static, alone.settings)
    refused = ""
    try:
        step: PipelinedStep | None = capture_pipelined(target, call, static, alone.settings)
    except NOT_HERE as error:
        step, refused = None, reason_of(error)
    return _Traced(captured, step, refused, around, notes).chosen(around)


@dataclass(frozen=True)
class _Traced:
    """A traced step, whose number of stages can be chosen again for another budget or number of devices.

    Attributes:
        captured: the step without a pipeline.
        step: the step whose loss is cut, or None if it cannot be.
        refused: why it cannot be.
        around: what surrounds the step.
        notes: on the step.
    """

    captured: Captured
    step: PipelinedStep | None
    refused: str
    around: Environment
    notes: Sequence[str]

    def __call__(self, *, memory_bytes: int | None = None, num_devices: int | None = None) -> Any:
        """Plans again, as `Plan.replan` does."""
        return self.chosen(with_budget(self.around, memory_bytes, num_devices)).plan

    def chosen(self, around: Environment) -> Entry:
        """Returns the entry of the fastest number of stages that fits."""
        settings = around.settings
        most, room = settings.context.pipeline_stages, settings.memory_bytes or settings.topology.memory_bytes
        counts = stage_counts(settings.num_devices, most, self.step.loss.num_micro if self.step is not None else 1)
        search = _Search(self, around)
        if self.step is None:
            search.choices.refused[counted(most, "stage")] = self.refused
        for count in counts:
            search.plan(count, room)
        search.fit(room)
        search.deepen(room)
        candidates = search.choices.candidates
        if not candidates:
            raise search.failed[0]
        chosen = best_of(candidates, room)
        more = [*choice_notes(chosen, search.choices, most, room), *search.proven(chosen, counts)]
        if settings.memory_bytes is None and any(own.memory_bytes > room for own in candidates):
            text = f"What needs more than a device's {bytes_text(room)} was planned for speed: memory_bytes={room} plans all within it."
            more.append(text)
        return search.entry(chosen, more)


class _Search:
    """Plans a traced step on numbers of stages, with what surrounds it."""

    def __init__(self, traced: _Traced, around: Environment) -> None:
        step = traced.step
        self._traced, self._captured, self._step, self._around, self._notes = traced, traced.captured, step, around, traced.notes
        self._planner = PipelinePlanner(step, around.settings, plan_program) if step is not None else None
        self._single: Entry | None = None
        self._unlimited: dict[Candidate, Unlimited] = {}
        self._fitted: dict[Candidate, PlannedPipeline] = {}
        self.choices = Choices([], {}, {})
        self.failed: list[InfeasibleError] = []

    def plan(self, count: int, memory_bytes: int) -> None:
        """Plans a number of stages, whatever memory pipelines take, and keeps what it finds."""
        if count == 1:
            self._plan_single()
        elif self._step is not None:
            context = self._around.settings.context
            given = scheduler_of(context) if sets_schedule(context) else None
            best_s = self._known(memory_bytes).best_s(memory_bytes)
            plan_schedules(self.choices, count, self._step.loss.num_micro, lambda own: self._freely(count, own), best_s, given)

    def fit(self, memory_bytes: int) -> None:
        """Fits what is planned into the memory of a device as far as it could be the fastest, and adds all to the choices."""
        self._fit(list(self._unlimited), memory_bytes)

    def deepen(self, memory_bytes: int) -> None:
        """Plans more chunks on each stage where they promise to beat the best so far; a schedule that the user sets is kept."""
        if self._step is None or not self.choices.candidates or sets_schedule(self._around.settings.context):
            return
        best = best_of(self.choices.candidates, memory_bytes)
        planned = {own.schedule: own for own in self._unlimited if own.stages == best.stages}
        plain, two = planned.get(PLAIN.name), planned.get(shown(INTERLEAVED))
        if plain is None or two is None:
            return
        if best.memory_bytes > memory_bytes:
            leave_deeper(self.choices, best)
            return
        found = estimates(self._unlimited[plain].chosen.found, self._around.settings.topology, (INTERLEAVED, *DEEPER))
        deeper = plan_deeper(self.choices, best, two, found, lambda own: self._freely(best.stages, own))
        if deeper is not None:
            self._fit([deeper.candidate], memory_bytes)

    def entry(self, chosen: Candidate, notes: Sequence[str]) -> Entry:
        """Returns the entry of a candidate, with notes on the choice."""
        if chosen.stages == 1 or self._planner is None or self._step is None:
            single = self._single
            assert single is not None, "what is no pipeline was planned on one stage"
            planned = replace(single.planned, plan=replace(single.planned.plan, replan=self._traced))
            return PlannedEntry(single.captured, single.environment, notes, planned)
        pipeline = self._fitted.get(chosen) or self._planner.fitted(self._unlimited[chosen], wants_fit=False)
        pipeline.notes.extend(notes)
        return PipelinedEntry(self._step, _of(self._around, chosen.stages), self._notes, pipeline, self._traced)

    def proven(self, chosen: Candidate, counts: Sequence[int]) -> list[str]:
        """Returns a note on what is proven of all numbers of stages and schedules, of which one is chosen."""
        if self._planner is None:
            return []
        context = self._around.settings.context
        schedulers = [scheduler_of(context)] if sets_schedule(context) else EVERY
        planned = (own.chosen.found.schedule.num_chunks for own in self._unlimited.values())
        num_chunks = max([*(own.num_chunks(max(counts)) for own in schedulers), *planned])
        least_s = self._planner.least_of_all_s(num_chunks, self._captured.built() if self._single is not None else None)
        return [choice_note(chosen.seconds, least_s, max(counts))]

    def _plan_single(self) -> None:
        single = Entry(self._captured, _of(self._around, 1), self._notes)
        try:
            cost = single.planned.plan.cost
        except InfeasibleError as error:
            self.choices.refused["1 stage"] = reason_of(error)
            self.failed.insert(0, error)
            return
        self._single = single
        self.choices.candidates.append(Candidate(1, cost.total_s, cost.total_s - cost.compute_s, cost.memory_bytes))

    def _fit(self, planned: Sequence[Candidate], memory_bytes: int) -> None:
        is_binding = self._around.settings.memory_bytes is not None
        fit_promising(self.choices, planned, self._within, memory_bytes, is_binding=is_binding)

    def _known(self, memory_bytes: int) -> Choices:
        """Returns the choices with what fits of all that is planned."""
        fitting = [own for own in self._unlimited if own.memory_bytes <= memory_bytes]
        return self.choices._replace(candidates=[*self.choices.candidates, *fitting])

    def _freely(self, count: int, scheduler: Scheduler) -> Tried:
        assert self._planner is not None, "only a step whose loss is cut has several stages"
        settings = _of(self._around, count).settings
        try:
            found = self._planner.freely(
                settings, scheduler.num_chunks(count), lambda costs, num_micro: scheduler.schedule(count, num_micro, costs)
            )
        except InfeasibleError as error:
            self.failed.append(error)
            raise
        own = tried(found.chosen.found, settings.topology)
        self._unlimited[own.candidate] = found
        return own

    def _within(self, own: Candidate) -> Candidate:
        assert self._planner is not None, "only a step whose loss is cut has several stages"
        try:
            found = self._planner.fitted(self._unlimited[own])
        except InfeasibleError as error:
            self.failed.append(error)
            raise
        fitted = tried(found, self._around.settings.topology).candidate
        self._fitted[fitted] = found
        return fitted


def _of(around: Environment, count: int) -> Environment:
    """Returns what surrounds a step on so many stages."""
    context = around.settings.context.with_checked({"pipeline_stages": count, "auto_pipeline": False})
    return replace(around, settings=replace(around.settings, context=context))
