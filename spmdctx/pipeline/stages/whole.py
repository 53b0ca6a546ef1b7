"""Plans a pipelined step: where the loss is cut, how each chunk is split, and what each stage does after the loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from spmdctx.errors import PlanMismatchError, UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import TensorSharding
from spmdctx.pipeline.capture.around import EVERYWHERE, Around, Placement, Program, around_of, is_array, programs_of
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.cut.choose import choose_cuts
from spmdctx.pipeline.cut.chunks import Chunk, chunks_of
from spmdctx.pipeline.cut.costs import EquationCosts, Seconds
from spmdctx.pipeline.cut.inline import inlined
from spmdctx.pipeline.cut.line import line_of, variables
from spmdctx.pipeline.cut.reasons import CutLine
from spmdctx.pipeline.programs.passes import Passes
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.schedule.simulate import Simulation, simulate
from spmdctx.pipeline.schedule.tasks import Costs, Schedule, cost_of
from spmdctx.pipeline.stages.captured import LossLeaf, Operand, Outcome, captured_program
from spmdctx.pipeline.stages.plans import ChunkPlanner, Planned, PlannedChunk, Planner
from spmdctx.trace.build.origins import source_line
from spmdctx.trace.scope.settings import Settings

ScheduleOf = Callable[[Sequence[Costs], int], Schedule]
"""Makes a schedule for chunks of these costs and so many micro-batches."""


class Decided(NamedTuple):
    """What another plan of the same step has decided: the last equations before the cuts, and the mesh of a stage."""

    cuts: tuple[int, ...]
    mesh: LogicalMesh


@dataclass(frozen=True)
class PlannedProgram:
    """A program after the loss with its plan, its name, and the places of operands whose memory it reuses."""

    program: Program
    planned: Planned
    name: str
    donated: tuple[int, ...]


@dataclass
class PlannedPipeline:
    """A pipelined step with its plans. `placed` has the sharding of each array around the loss on its stage."""

    step: PipelinedStep
    around: Around
    placement: Placement
    schedule: Schedule
    simulation: Simulation
    chunks: list[Chunk]
    cut: CutLine
    planned: list[PlannedChunk]
    mesh: LogicalMesh
    rounds: list[list[PlannedProgram]] = field(default_factory=list)
    placed: dict[Any, TensorSharding] = field(default_factory=dict)

    def stage_of_chunk(self, chunk: int) -> int:
        """Returns the stage of a chunk."""
        return self.schedule.stage_of[chunk]

    def readers(self, leaf: int) -> list[int]:
        """Returns the chunks that read a leaf of the loss; the first one owns it."""
        return [number for number, chunk in enumerate(self.chunks) if leaf in chunk.leaves]


def plan_pipeline(
    step: PipelinedStep, settings: Settings, num_chunks: int, schedule_of: ScheduleOf, planner: Planner, decided: Decided | None = None
) -> PlannedPipeline:
    """Plans a step on a pipeline.

    Args:
        step: the captured step.
        settings: of the whole step; its devices are divided over the stages.
        num_chunks: into how many parts the loss is cut.
        schedule_of: makes the schedule from the estimated costs of the chunks.
        planner: plans a captured program on the devices of one stage.
        decided: where the loss is cut, and the mesh of a stage, if both are decided already.

    Raises:
        UnsupportedError: the loss has too few equations, or what follows it mixes arrays of several stages.
    """
    loss, captured = step.loss, step.captured
    chunks, estimates, cut = _cut(step, settings, num_chunks, None if decided is None else decided.cuts)
    schedule = schedule_of([Costs(one.forward, one.backward, one.backward / 2, one.backward / 2) for one in estimates], loss.num_micro)
    num_stages = schedule.num_stages
    own = replace(
        settings,
        num_devices=settings.num_devices // num_stages,
        context=settings.context.with_checked({"pipeline_stages": 1, "device_num": settings.num_devices // num_stages}),
        mesh=settings.mesh if decided is None else decided.mesh,
    )
    around = around_of(captured.jaxpr)
    inputs = dict(zip(around.jaxpr.jaxpr.invars, captured.inputs, strict=True))
    leaves = [
        LossLeaf(path, inputs[var].role if var in inputs else Role.KEY if operand.is_key else Role.PARAMETER)
        for path, var, operand in zip(loss.paths, around.loss.invars, loss.operands, strict=True)
    ]
    passes = [Passes(chunk, loss.differentiated, loss.value) for chunk in chunks]
    planned = ChunkPlanner(planner, own, leaves, splits_backward=schedule.splits_backward).plan(passes)
    simulation = simulate(schedule, cost_of([chunk.costs for chunk in planned]))
    pipeline = PlannedPipeline(
        step, around, _placement(step, around, chunks, schedule), schedule, simulation, chunks, cut, planned, planned[0].mesh
    )
    _place_leaves(pipeline)
    _plan_rounds(pipeline, replace(own, mesh=pipeline.mesh), planner)
    return pipeline


def _cut(
    step: PipelinedStep, settings: Settings, num_chunks: int, cuts: tuple[int, ...] | None
) -> tuple[list[Chunk], list[Seconds], CutLine]:
    """Returns the chunks of the loss, what they are estimated to take, and the line with its cuts."""
    loss = step.loss
    line = line_of(inlined(loss.forward), loss.is_parameter)
    costs = EquationCosts(settings.topology)
    seconds = [costs.seconds(eqn) for eqn in line.eqns]
    found = choose_cuts([sum(one) for one in seconds], line.crossing, num_chunks)
    if found is None:
        raise UnsupportedError(
            f"The loss has {len(line.eqns)} equations that can be cut, which is too few for {num_chunks} chunks.",
            where=loss.where,
            fix="use fewer pipeline stages",
        )
    if cuts is not None:
        _check_cuts(cuts, len(line.eqns), num_chunks, loss.where)
        found = found._replace(places=cuts)
    bounds = [0, *(place + 1 for place in found.places), len(line.eqns)]
    parts = [seconds[first:last] for first, last in pairwise(bounds)]
    estimates = [Seconds(sum(one.forward for one in part), sum(one.backward for one in part)) for part in parts]
    sources = [eqn.source_info for eqn in line.eqns]
    cut = CutLine([sum(one) for one in seconds], line.crossing, found.places, found.limit, lambda place: source_line(sources[place]))
    return chunks_of(line, found.places, loss.carried), estimates, cut


def _check_cuts(cuts: tuple[int, ...], num_equations: int, num_chunks: int, where: str) -> None:
    """Refuses cuts that were decided for another program.

    Raises:
        PlanMismatchError: they do not fit on the line.
    """
    if len(cuts) != num_chunks - 1 or any(first >= last for first, last in pairwise((-1, *cuts, num_equations - 1))):
        raise PlanMismatchError(
            "The plan was made for another program: its cuts do not fit the loss.",
            where=where,
            got=f"cuts behind equations {', '.join(map(str, cuts))} of {num_equations}",
            fix="plan again without the saved plan",
        )


def _placement(step: PipelinedStep, around: Around, chunks: Sequence[Chunk], schedule: Schedule) -> Placement:
    """Returns the stages of all arrays around the loss: leaves and gradients lie with the first chunk that reads them."""
    loss = step.loss
    owner = {leaf: schedule.stage_of[number] for number, chunk in reversed([*enumerate(chunks)]) for leaf in chunk.leaves}
    known = {var: owner[leaf] for leaf, var in enumerate(around.loss.invars) if leaf in owner and not _is_literal(var)}
    for index, var in enumerate(around.loss.outvars):
        known[var] = owner[loss.gradient_of[index]] if index in loss.gradient_of else _maker(chunks, schedule, loss.made_by[index])
    names = dict(zip(around.jaxpr.jaxpr.invars, (leaf.path for leaf in step.captured.inputs), strict=True))
    return Placement(around, known, names)


def _maker(chunks: Sequence[Chunk], schedule: Schedule, result: int) -> int:
    return next(schedule.stage_of[number] for number, chunk in enumerate(chunks) if result in chunk.results)


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _place_leaves(pipeline: PlannedPipeline) -> None:
    """Fills in the shardings of the loss's leaves, and of its gradients."""
    loss, around = pipeline.step.loss, pipeline.around
    for leaf, var in enumerate(around.loss.invars):
        readers = pipeline.readers(leaf)
        if readers and not _is_literal(var):
            pipeline.placed[var] = pipeline.planned[readers[0]].joint.shardings[Slot(Holds.LEAF, leaf)]
    for index, leaf in loss.gradient_of.items():
        pipeline.placed[around.loss.outvars[index]] = pipeline.planned[pipeline.readers(leaf)[0]].joint.shardings[Slot(Holds.SUM, leaf)]


def _plan_rounds(pipeline: PlannedPipeline, settings: Settings, planner: Planner) -> None:
    """Plans what each stage does after the loss; a program takes arrays as the ones before it have left them."""
    around, captured = pipeline.around, pipeline.step.captured
    body = around.jaxpr.jaxpr
    inputs = dict(zip(body.invars, captured.inputs, strict=True))
    sources = {
        var: body.invars[leaf.carried_from]
        for var, leaf in zip(body.outvars, captured.outputs, strict=True)
        if leaf.carried_from is not None
    }
    rounds = programs_of(around, pipeline.placement, pipeline.schedule.num_stages)
    reused = _Reused(rounds, sources, {var for var, leaf in inputs.items() if leaf.donated} - set(variables(body.outvars)))
    for number, programs in enumerate(rounds):
        found = []
        for program in programs:
            donated = reused.by(number, program)
            operands = [_operand(var, inputs, pipeline.placed, index in donated) for index, var in enumerate(program.inputs)]
            places = {var: index for index, var in enumerate(program.inputs)}
            results = [_outcome(var, sources, places, pipeline.placed) for var in program.outputs]
            name = f"after{number}_{program.stage}"
            planned = planner(captured_program(name, program.jaxpr, settings.mesh, operands, results), settings)
            graph, values = planned.program.graph, planned.assignment.values
            for var, value in (*zip(program.inputs, graph.inputs, strict=True), *zip(program.outputs, graph.outputs, strict=True)):
                if is_array(var) and value >= 0:
                    pipeline.placed.setdefault(var, values[value])
            found.append(PlannedProgram(program, planned, name, donated))
        pipeline.rounds.append(found)


class _Reused:
    """Says which programs after the loss may reuse the memory of donated state.

    That is the last program that reads it, if this one makes its next value.
    """

    def __init__(self, rounds: Sequence[Sequence[Program]], sources: Mapping[Any, Any], donated: Collection[Any]) -> None:
        self._sources, self._donated = sources, donated
        self._last = {
            var: (number, program.stage) for number, programs in enumerate(rounds) for program in programs for var in program.inputs
        }

    def by(self, number: int, program: Program) -> tuple[int, ...]:
        """Returns the places of the operands whose memory a program of a round may reuse; scalars are on several stages."""
        renewed = {self._sources.get(var) for var in program.outputs}
        return tuple(
            index
            for index, var in enumerate(program.inputs)
            if var in self._donated and var in renewed and is_array(var) and self._last[var] == (number, program.stage)
        )


def _operand(var: Any, inputs: Mapping[Any, Any], placed: Mapping[Any, TensorSharding], is_reused: bool) -> Operand:
    leaf = inputs.get(var)
    role = Role.ARGUMENT if leaf is None else leaf.role
    return Operand("value" if leaf is None else leaf.path, role, placed.get(var), is_reused)


def _outcome(var: Any, sources: Mapping[Any, Any], places: Mapping[Any, int], placed: Mapping[Any, TensorSharding]) -> Outcome:
    """Returns a result of a program; the next value of an input is split as the input."""
    source = sources.get(var)
    if source is None:
        return Outcome("value")
    return Outcome("value", placed.get(source), places.get(source))


def stages_of(pipeline: PlannedPipeline, var: Any) -> int:
    """Returns the stage on which a value around the loss lies; scalars lie on the first one."""
    stage = pipeline.placement.stage_of.get(var, EVERYWHERE)
    return max(stage, 0)
