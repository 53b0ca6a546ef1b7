"""Plans a pipelined step whose number of stages and schedule are decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.data import PipelineData
from spmdctx.pipeline.schedule.bounds import Bounds
from spmdctx.pipeline.search.balance import balanced
from spmdctx.pipeline.search.bound import least_makespan_of_cuts_s
from spmdctx.pipeline.search.proven import LeastWork, bounds_note, least_of_all_s, least_of_chunks_s, least_of_cuts_s, least_work
from spmdctx.pipeline.search.reduced import Chosen, best_completed, reduced_once, reduction_notes
from spmdctx.pipeline.search.stacked import stacked_notes
from spmdctx.pipeline.search.suggestion import suggested
from spmdctx.pipeline.search.within import over, within
from spmdctx.pipeline.stages.alike import AlikePlanner
from spmdctx.pipeline.stages.notes import explaining_shares, over_memory
from spmdctx.pipeline.stages.plans import REDUCTION, Planner
from spmdctx.pipeline.stages.staging import ScheduleOf, Stages, Staging, cut_loss, scaled
from spmdctx.pipeline.stages.whole import PlannedPipeline, completed, surrounded
from spmdctx.trace.build.program import Program
from spmdctx.trace.collector import no_garbage_collection
from spmdctx.trace.scope.settings import Settings


class Unlimited(NamedTuple):
    """A pipeline that is planned whatever memory it takes, and how it is planned in other ways: see `reduced_once`."""

    settings: Settings
    chosen: Chosen
    planned: Callable[[bool, Chosen | None], Chosen]


class PipelinePlanner:
    """Plans a step on a pipeline. Schedules and numbers of stages share what is alike: the cut loss, and the plans of equal programs.

    Args:
        step: the captured step.
        settings: of any number of stages; they give the machine.
        planner: plans a captured program on the devices of one stage.
    """

    @no_garbage_collection()
    def __init__(self, step: PipelinedStep, settings: Settings, planner: Planner) -> None:
        self._loss, self._settings = cut_loss(step, settings), settings
        self._planner = AlikePlanner(planner)
        self._begun: dict[tuple[int, int, bool], tuple[tuple[int, ...], LogicalMesh | None]] = {}

    def plan(self, settings: Settings, num_chunks: int, schedule_of: ScheduleOf) -> PlannedPipeline:
        """Plans one number of stages and one schedule; see `plan_pipeline`."""
        return self.fitted(self.freely(settings, num_chunks, schedule_of))

    @no_garbage_collection()
    def freely(self, settings: Settings, num_chunks: int, schedule_of: ScheduleOf) -> Unlimited:
        """Plans one number of stages and one schedule, whatever memory the stages take."""
        free = replace(settings, memory_bytes=None)
        room = settings.memory_bytes or settings.topology.memory_bytes

        def planned(may_wait: bool, like: Chosen | None) -> Chosen:
            planner = self._planner if like is None else self._planner.roughly
            return self._planned(Staging(self._loss, free, num_chunks, schedule_of, planner, holds=may_wait), like, room)

        with explaining_shares(self._loss.step, settings):
            return Unlimited(settings, planned(True, None), planned)

    @no_garbage_collection()
    def fitted(self, own: Unlimited, *, wants_fit: bool = True) -> PlannedPipeline:
        """Returns a plan that is planned again within the budget, or without one within the memory of a device, if it takes more.

        Without a budget it is kept as it is, with a note, where nothing fits, or where it is not wanted to.
        """
        settings = own.settings
        room = settings.memory_bytes or settings.topology.memory_bytes
        is_searched = settings.context.parallel_mode == "auto_parallel"
        is_binding = settings.memory_bytes is not None and is_searched

        def fit(chosen: Chosen) -> Chosen:
            if not is_searched or not (wants_fit or is_binding):
                raise over(chosen.found, room)
            return within(chosen, room)

        with explaining_shares(self._loss.step, settings):
            staging, stages, found = reduced_once(own.chosen, own.planned, fit, room, is_binding=is_binding)
        found.notes += [*reduction_notes(found, settings.context), *stacked_notes(found), *over_memory(found, settings)]
        if is_searched:
            found.bounds = self._bounds(staging, stages)
            found.notes.append(bounds_note(found.schedule, found.simulation.makespan_s, found.bounds))
        return found

    def _planned(self, staging: Staging, like: Chosen | None, room: int) -> Chosen:
        # Another schedule of as many chunks has moved the cuts, and found a mesh.
        known = (staging.num_chunks, staging.settings.num_devices, staging.holds)
        begun = self._begun.get(known) if like is None else (like.stages.places, like.found.mesh)
        if begun is None:
            stages = balanced(staging)
            self._begun[known] = stages.places, staging.settings.mesh
        else:
            places, mesh = begun
            staging.settings = replace(staging.settings, mesh=mesh)
            stages = staging.plan(places)
        return Chosen(staging, stages, best_completed(staging, stages, room))

    def least_of_all_s(self, num_chunks: int, single: Program | None) -> float:
        """Returns seconds below which no step runs in so many chunks at most, nor without a pipeline as the program `single`; see there."""
        loss = self._loss.step.loss
        return least_of_all_s(self._work, num_chunks, loss.num_micro, single, self._settings)

    @cached_property
    def _work(self) -> LeastWork:
        return least_work(self._loss, self._settings.topology)

    def _bounds(self, staging: Staging, stages: Stages) -> Bounds:
        cuts_s = least_of_cuts_s(self._work, stages.schedule, self._settings.num_devices)
        chunks_s = least_of_chunks_s(stages.planned, stages.schedule, self._settings.topology)
        return Bounds(max(chunks_s, cuts_s), cuts_s, _estimated_s(staging, stages))


def plan_pipeline(step: PipelinedStep, settings: Settings, num_chunks: int, schedule_of: ScheduleOf, planner: Planner) -> PlannedPipeline:
    """Plans a step on a pipeline.

    Args:
        step: the captured step.
        settings: of the whole step; its devices are divided over the stages.
        num_chunks: into how many parts the loss is cut.
        schedule_of: makes the schedule from the costs of the chunks: first the estimated ones, then the planned ones.
        planner: plans a captured program on the devices of one stage.

    Raises:
        InfeasibleError: a stage needs more than `memory_bytes`.
        UnsupportedError: the loss has too few equations, or what follows it mixes arrays that stages share with others.
    """
    found = PipelinePlanner(step, settings, planner).plan(settings, num_chunks, schedule_of)
    if settings.context.parallel_mode == "auto_parallel":
        found.notes += suggested(found, settings.topology)
    return found


def plan_as_decided(step: PipelinedStep, settings: Settings, plan: PipelineData, planner: Planner, where: str) -> PlannedPipeline:
    """Plans a step as a plan says that was made for the same step; `planner` gives the plan of each program.

    Raises:
        PlanMismatchError: the plan in the file `where` was made for another program.
    """
    schedule = plan.simulation.schedule
    holds = any(name.startswith(REDUCTION) for stage in plan.stages for name in stage.after)
    free = replace(settings, memory_bytes=None)
    staging = Staging(cut_loss(step, settings), free, schedule.num_chunks, lambda *_: schedule, planner, holds)
    staging.check(plan.cuts, where)
    staging.settings = replace(staging.settings, mesh=plan.logical_mesh)
    found = completed(staging, surrounded(staging.plan(plan.cuts)))
    found.notes += plan.notes
    return found


def _estimated_s(staging: Staging, stages: Stages) -> float | None:
    """Returns a bound on the schedule of any cut, as far as estimates share out bounds rightly; None if a chunk's plan has none."""
    bounds = [chunk.joint.planned.plan.lower_bound_s for chunk in stages.planned]
    if any(bound is None for bound in bounds):
        return None
    seconds = scaled(staging.estimates, stages.places, bounds)
    schedule = stages.schedule
    several = schedule.splits_backward or schedule.num_chunks > schedule.num_stages
    return least_makespan_of_cuts_s(seconds, schedule.num_stages, schedule.num_micro, splits=several)
