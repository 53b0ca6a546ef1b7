"""Cuts a loss into chunks and plans them, for one number of stages and one schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from spmdctx.errors import PlanMismatchError, UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.pipeline.capture.around import Around, around_of
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.capture.loss import PipelinedLoss
from spmdctx.pipeline.cut.choose import Cuts, Range, choose_cuts, even_cuts
from spmdctx.pipeline.cut.chunks import Chunk, chunks_of
from spmdctx.pipeline.cut.costs import Seconds, line_seconds
from spmdctx.pipeline.cut.inline import inlined
from spmdctx.pipeline.cut.line import Line, joined_scans, line_of
from spmdctx.pipeline.cut.pins import marks_of, pinned_ranges, without_marks
from spmdctx.pipeline.cut.reasons import CutLine
from spmdctx.pipeline.cut.tangents import beside_loss, without_tangents
from spmdctx.pipeline.programs.passes import Passes
from spmdctx.pipeline.programs.stacks import Stack, StoredStack, stored
from spmdctx.pipeline.schedule.simulate import Simulation, simulate
from spmdctx.pipeline.schedule.tasks import Costs, Schedule, cost_of
from spmdctx.pipeline.stages.captured import LossLeaf, batch_entries
from spmdctx.pipeline.stages.hops import hops_of
from spmdctx.pipeline.stages.plans import ChunkPlanner, PlannedChunk, Planner
from spmdctx.pipeline.stages.slices import sliced
from spmdctx.trace.build.origins import source_line
from spmdctx.trace.scope.settings import Settings

ScheduleOf = Callable[[Sequence[Costs], int], Schedule]
"""Makes a schedule for chunks of these costs and so many micro-batches."""


@dataclass(frozen=True)
class CutLoss:
    """A captured step with the line on which its loss is cut, the estimated time of each equation there, and the stages of marked ones.

    `around` is the step's program around the loss; `entries` are those of a dataset_strategy, by the path of the batch leaf.
    `surroundings` keeps what stages do around the chunks of a loss that is divided, by the stages of the chunks.
    """

    step: PipelinedStep
    line: Line
    seconds: tuple[Seconds, ...]
    marks: Mapping[int, int]
    around: Around
    entries: Mapping[str, object] = field(default_factory=dict)
    surroundings: dict[tuple[int, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _divided: dict[tuple[int, ...], Divided] = field(default_factory=dict, init=False, repr=False, compare=False)

    def divided(self, places: tuple[int, ...]) -> Divided:
        """Returns the loss in chunks, cut behind the equations `places`; schedules of as many chunks share them.

        Raises:
            UnsupportedError: several chunks share state that micro-batches change.
        """
        known = self._divided.get(places)
        if known is None:
            line, own_places = joined_scans(self.line, places)
            line, loss, around, stacks = sliced(line, self.step.loss, self.around)
            own = replace(self, step=replace(self.step, loss=loss), line=line, around=around)
            chunks = chunks_of(line, own_places, loss.carried, loss.differentiated)
            if loss.is_marked:
                chunks = [chunk._replace(program=without_marks(chunk.program)) for chunk in chunks]
            _check_state(loss, chunks)
            still = without_tangents(line, loss.differentiated) | beside_loss(line, loss.value)
            passes = [Passes(chunk, loss.differentiated, loss.value, still) for chunk in chunks]
            known = self._divided[places] = Divided(own, chunks, passes, stacks, {})
        return known

    @cached_property
    def leaves(self) -> list[LossLeaf]:
        """The inputs of the loss, as plans name them."""
        loss, around = self.step.loss, self.around
        inputs = dict(zip(around.jaxpr.jaxpr.invars, self.step.captured.inputs, strict=True))
        return [
            LossLeaf(
                path,
                inputs[var].role if var in inputs else Role.KEY if operand.is_key else Role.PARAMETER,
                self.entries.get(inputs[var].path) if var in inputs else None,
            )
            for path, var, operand in zip(loss.paths, around.loss.invars, loss.operands, strict=True)
        ]


class Divided(NamedTuple):
    """A loss in chunks, with both passes of each. In `loss`, layers of stacked parameters are leaves of their own.

    `planned` has the plans of the chunks by what they are for: whether backward passes are in two parts, and the settings of a stage.
    """

    loss: CutLoss
    chunks: list[Chunk]
    passes: list[Passes]
    stacks: Sequence[Stack]
    planned: dict[Any, list[PlannedChunk]]


def cut_loss(step: PipelinedStep, settings: Settings) -> CutLoss:
    """Puts the loss of a step into a line, and estimates its seconds on a machine."""
    line = line_of(inlined(step.loss.forward), step.loss.is_parameter)
    marks = marks_of(line.eqns) if step.loss.is_marked else {}
    entries = batch_entries(step.captured, settings.context.dataset_strategy)
    return CutLoss(step, line, tuple(line_seconds(line, settings.topology)), marks, around_of(step.captured.jaxpr), entries=entries)


@dataclass(frozen=True)
class Stages:
    """A loss cut behind the equations `places`, with the plans of its chunks and its schedule.

    In `loss`, layers of stacked parameters are leaves of their own; `stacks` says where these parameters and their gradients are kept.
    """

    places: tuple[int, ...]
    loss: CutLoss
    chunks: list[Chunk]
    planned: list[PlannedChunk]
    schedule: Schedule
    simulation: Simulation
    stacks: Sequence[StoredStack] = ()

    @property
    def seconds(self) -> list[float]:
        """The planned seconds of each chunk for one micro-batch."""
        return [sum(chunk.costs.of(kind) for kind in chunk.tasks) for chunk in self.planned]

    @property
    def unmoved_s(self) -> float:
        """The seconds of the schedule if nothing moved between stages."""
        costs = cost_of([chunk.costs for chunk in self.planned])
        return simulate(self.schedule, costs, lambda chunk, reader: 0.0).makespan_s

    @property
    def imbalance(self) -> float:
        """The longest stage over the mean."""
        stages = [0.0] * self.schedule.num_stages
        for stage, seconds in zip(self.schedule.stage_of, self.seconds, strict=True):
            stages[stage] += seconds
        return max(stages) * len(stages) / max(sum(stages), 1e-300)


class Staging:
    """Cuts and plans a loss for one number of chunks.

    Args:
        loss: the loss on its line.
        settings: of the whole step; its devices are divided over the stages.
        num_chunks: into how many parts the loss is cut.
        schedule_of: makes the schedule from the costs of the chunks: first the estimated ones, then the planned ones.
        planner: plans a captured program on the devices of one stage.
        holds: whether gradients may wait for the last micro-batch to be reduced; those in buckets by index do not.

    `num_limited` is the number of chunks, from the first one on, which keep to the memory of `settings`; None if all do.
    """

    def __init__(
        self, loss: CutLoss, settings: Settings, num_chunks: int, schedule_of: ScheduleOf, planner: Planner, holds: bool = True
    ) -> None:
        self.loss, self.planner, self.given = loss, planner, settings
        self.parts, self.holds = (num_chunks, schedule_of, planner, holds), holds
        self.num_limited: int | None = None
        self._runs = loss.step.loss.num_micro if holds and not settings.context.fuses_by_index else 1
        self.num_chunks, self._schedule_of, self._num_micro = num_chunks, schedule_of, loss.step.loss.num_micro
        even = [Costs(1.0, 2.0, 1.0, 1.0)] * num_chunks
        self._stage_of = schedule_of(even, self._num_micro).stage_of
        self._first = self.cut(self.estimates)
        estimated = [self._costs(part) for part in self._parts(self._first)]
        self._splits = (schedule := schedule_of(estimated, self._num_micro)).splits_backward
        count = settings.num_devices // schedule.num_stages
        self.settings = replace(
            settings, num_devices=count, context=settings.context.with_checked({"pipeline_stages": 1, "device_num": count})
        )

    @property
    def estimates(self) -> list[float]:
        """The estimated seconds of each equation of the line, both passes together."""
        return [sum(own) for own in self.loss.seconds]

    def cut(self, seconds: Sequence[float]) -> tuple[int, ...]:
        """Returns where the line is cut if its equations take these seconds.

        Raises:
            StrategyError: marks of stages that no cut obeys.
            UnsupportedError: there are too few equations.
        """
        return self._cuts(seconds).places

    def even_places(self) -> tuple[int, ...] | None:
        """Returns the cuts that give all stages as many iterations of the longest scan; None if marks or its length do not allow that.

        Several chunks of a stage never use what it keeps, which are neighbours.
        """
        line = self.loss.line
        count, lengths = self.num_chunks, [eqn.params["length"] for eqn in line.scans]
        if not lengths or max(lengths) % count or self.loss.marks or max(self._stage_of) + 1 < count:
            return None
        scan, share = lengths.index(max(lengths)), max(lengths) // count
        place_of = {line.tag_of[id(eqn)]: place for place, eqn in enumerate(line.eqns)}
        return tuple(place_of["scan", scan, share * number] for number in range(1, count))

    def cut_line(self, stages: Stages) -> CutLine:
        """Returns the line with the cuts of planned stages, and with the planned seconds of each chunk shared out by the estimates."""
        line, seconds = self.loss.line, scaled(self.estimates, stages.places, stages.seconds)
        sources = [eqn.source_info for eqn in line.eqns]
        return CutLine(seconds, line.crossing, stages.places, self._cuts(seconds).limit, lambda place: source_line(sources[place]))

    def proposals(self, seconds: Sequence[float], largest: float) -> list[tuple[int, ...]]:
        """Returns the most even cuts for several limits on the bytes that cross each of them.

        Args:
            seconds: of each equation.
            largest: the most seconds that a chunk may take.
        """
        return even_cuts(seconds, self.loss.line.crossing, self.num_chunks, self._ranges(seconds), largest)

    def _ranges(self, seconds: Sequence[float]) -> Sequence[Range] | None:
        return pinned_ranges(self.loss.line.eqns, dict(self.loss.marks), self._stage_of, seconds, self.loss.step.loss.where)

    def _cuts(self, seconds: Sequence[float]) -> Cuts:
        line, where = self.loss.line, self.loss.step.loss.where
        found = choose_cuts(seconds, line.crossing, self.num_chunks, self._ranges(seconds))
        if found is None:
            raise UnsupportedError(
                f"The loss has {len(line.eqns)} equations that can be cut, which is too few for {self.num_chunks} chunks.",
                where=where,
                fix="use fewer pipeline stages, or fewer marks of stages" if self.loss.marks else "use fewer pipeline stages",
            )
        return found

    def check(self, places: tuple[int, ...], where: str) -> None:
        """Refuses places that were decided for another program, as the file `where` has them.

        Raises:
            PlanMismatchError: they do not fit on the line.
        """
        count = len(self.loss.seconds)
        if len(places) != self.num_chunks - 1 or any(first >= last for first, last in pairwise((-1, *places, count - 1))):
            raise PlanMismatchError(
                "The plan was made for another program: its cuts do not fit the loss.",
                where=where,
                got=f"cuts behind equations {', '.join(map(str, places))} of {count}",
                fix="plan again without the saved plan",
            )

    def plan(self, places: tuple[int, ...] | None = None) -> Stages:
        """Plans the chunks between some places, or between those of the estimated seconds."""
        places = self._first if places is None else places
        own, chunks, passes, stacks, known = self.loss.divided(tuple(places))
        num_stages = max(self._stage_of) + 1
        kept = [stored(stack, [self._stage_reading(part.leaf, chunks) for part in stack.parts], num_stages) for stack in stacks]
        key = (self._splits, self._runs, self.settings, self.planner, self.num_limited)
        if key not in known:
            planner = ChunkPlanner(
                self.planner,
                self.settings,
                own.leaves,
                splits_backward=self._splits,
                runs=self._runs,
                carried=self.loss.step.loss.carried,
                num_limited=self.num_limited,
            )
            known[key] = planner.plan(passes, twins_of(stacks))
        planned = known[key]
        # Other cuts are compared on the mesh that suits the first one.
        self.settings = replace(self.settings, mesh=planned[0].mesh)
        costs = [chunk.costs for chunk in planned]
        # The order of some schedules follows from the seconds of their tasks.
        schedule = self._schedule_of(costs, self._num_micro)
        simulation = simulate(schedule, cost_of(costs), hops_of(planned, schedule.stage_of, self.settings.topology))
        return Stages(places, own, chunks, planned, schedule, simulation, kept)

    def _stage_reading(self, leaf: int, chunks: Sequence[Chunk]) -> int:
        return next(self._stage_of[number] for number, chunk in enumerate(chunks) if leaf in chunk.leaves)

    def expected_s(self, places: Sequence[int], seconds: Sequence[float], known: Stages) -> float:
        """Returns the seconds of the schedule between other places, as far as planned stages tell.

        Args:
            places: of the cuts.
            seconds: of each equation of the line, as they were planned.
            known: the planned stages, whose passes and moves are taken to be like those of other cuts.
        """
        crossing, planned = self.loss.line.crossing, known.planned
        bounds = [0, *(place + 1 for place in places), len(seconds)]
        costs = []
        for (first, last), own in zip(pairwise(bounds), planned, strict=True):
            factor = sum(seconds[first:last]) / max(sum(own.costs.of(kind) for kind in own.tasks), 1e-300)
            costs.append(Costs(*(factor * one for one in own.costs)))
        hop_s = hops_of(planned, known.schedule.stage_of, self.settings.topology)

        def moved_s(chunk: int, reader: int) -> float:
            cut = min(chunk, reader)
            return hop_s(chunk, reader) * crossing[places[cut]] / max(crossing[known.places[cut]], 1.0)

        schedule = self._schedule_of(costs, self._num_micro)
        return simulate(schedule, cost_of(costs), moved_s).makespan_s

    def _parts(self, places: Sequence[int]) -> list[Sequence[Seconds]]:
        bounds = [0, *(place + 1 for place in places), len(self.loss.seconds)]
        return [self.loss.seconds[first:last] for first, last in pairwise(bounds)]

    def _costs(self, part: Sequence[Seconds]) -> Costs:
        forward, backward = sum(one.forward for one in part), sum(one.backward for one in part)
        return Costs(forward, backward, backward / 2, backward / 2)


def twins_of(stacks: Sequence[Stack]) -> dict[int, int]:
    """Returns for layers of a stack the first ones of it, by their numbers as leaves."""
    return {part.leaf: stack.parts[0].leaf for stack in stacks for part in stack.parts[1:]}


def _check_state(loss: PipelinedLoss, chunks: Sequence[Chunk]) -> None:
    """Refuses state that one chunk reads and another one changes: the first would read it before the micro-batch before has changed it."""
    for leaf, result in loss.carried.items():
        makers = {number for number, chunk in enumerate(chunks) if result in chunk.results}
        readers = {number for number, chunk in enumerate(chunks) if leaf in chunk.leaves}
        if not readers <= makers:
            raise UnsupportedError(
                f"Several chunks of the pipeline share the state '{loss.paths[leaf]}', which micro-batches change one after the other.",
                where=loss.where,
                got=f"read by chunks {', '.join(map(str, sorted(readers)))}, changed by {', '.join(map(str, sorted(makers)))}",
                fix="mark what uses it for one stage by spmdctx.pipeline_stage, or leave pipeline_stages out",
            )


def scaled(seconds: Sequence[float], places: Sequence[int], totals: Sequence[float]) -> list[float]:
    """Returns the seconds of a line's equations, scaled so that those of each chunk add up to a total."""
    bounds = [0, *(place + 1 for place in places), len(seconds)]
    found: list[float] = []
    for (first, last), planned in zip(pairwise(bounds), totals, strict=True):
        total = sum(seconds[first:last])
        factor = planned / total if total else 1.0
        found += [own * factor for own in seconds[first:last]]
    return found
