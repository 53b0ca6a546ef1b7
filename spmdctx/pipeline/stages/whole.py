"""Plans a pipelined step: where the loss is cut, how each chunk is split, and what each stage does after the loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh, replicated
from spmdctx.ir.sharding import TensorSharding
from spmdctx.pipeline.capture.around import EVERYWHERE, Around, Placement, Program, is_array, programs_of
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.cut.chunks import Chunk
from spmdctx.pipeline.cut.line import variables
from spmdctx.pipeline.cut.reasons import CutLine
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.schedule.simulate import Simulation
from spmdctx.pipeline.schedule.tasks import Schedule
from spmdctx.pipeline.stages.captured import Operand, Outcome, captured_program, with_entries
from spmdctx.pipeline.stages.plans import Planned, PlannedChunk, Planner
from spmdctx.pipeline.stages.staging import Stages, Staging
from spmdctx.trace.scope.settings import Settings


@dataclass(frozen=True)
class PlannedProgram:
    """A program after the loss with its plan, its name, and the places of operands whose memory it reuses."""

    program: Program
    planned: Planned
    name: str
    donated: tuple[int, ...]


@dataclass
class PlannedPipeline:
    """A pipelined step with its plans.

    `placed` has the sharding of each array around the loss on its stage. `bound_s` estimates the least time of any cut, if not None.
    `homes` gives for each stacked value, whose layers are leaves of the loss, the leaf of the first ones.
    """

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
    bound_s: float | None = None
    notes: list[str] = field(default_factory=list)
    homes: Mapping[Any, int] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """The planned seconds of a step: the schedule, and what follows the loss."""
        return self.simulation.makespan_s + sum(max((own.planned.plan.cost.total_s for own in one), default=0.0) for one in self.rounds)

    def stage_of_chunk(self, chunk: int) -> int:
        """Returns the stage of a chunk."""
        return self.schedule.stage_of[chunk]

    def readers(self, leaf: int) -> list[int]:
        """Returns the chunks that read a leaf of the loss; the first one owns it."""
        return [number for number, chunk in enumerate(self.chunks) if leaf in chunk.leaves]


def completed(staging: Staging, stages: Stages) -> PlannedPipeline:
    """Plans what a step does around its loss, whose stages are planned.

    Raises:
        UnsupportedError: what follows the loss mixes arrays of several stages.
    """
    step, around, homes = stages.loss.step, stages.loss.around, stages.loss.homes
    placement = _placement(step, around, homes, stages.chunks, stages.schedule)
    mesh = stages.planned[0].mesh
    line = staging.cut_line(stages)
    pipeline = PlannedPipeline(step, around, placement, stages.schedule, stages.simulation, stages.chunks, line, stages.planned, mesh)
    _place_leaves(pipeline)
    for var, leaf in homes.items():
        # Layers may be fewer than devices; what is stacked is split as they are, but for the dimension of layers.
        dims = pipeline.planned[pipeline.readers(leaf)[0]].joint.shardings[Slot(Holds.LEAF, leaf)]
        pipeline.placed[var] = ((), *dims[1:])
    pipeline.homes = homes
    _plan_rounds(pipeline, replace(staging.settings, mesh=mesh), staging.planner)
    return pipeline


def _placement(step: PipelinedStep, around: Around, homes: Mapping[Any, int], chunks: Sequence[Chunk], schedule: Schedule) -> Placement:
    """Returns the stages of all arrays around the loss: leaves and gradients lie with the first chunk that reads them."""
    loss = step.loss
    owner = {leaf: schedule.stage_of[number] for number, chunk in reversed([*enumerate(chunks)]) for leaf in chunk.leaves}
    known = {var: owner[leaf] for leaf, var in enumerate(around.loss.invars) if leaf in owner and not _is_literal(var)}
    for index, var in enumerate(around.loss.outvars):
        if index in loss.gradient_of:
            known[var] = owner[loss.gradient_of[index]]
        elif index in loss.made_by:
            known[var] = _maker(chunks, schedule, loss.made_by[index])
    known.update({var: owner[leaf] for var, leaf in homes.items()})
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
            free = with_entries(settings, [None] * sum(operand.role is Role.BATCH for operand in operands))
            planned = planner(captured_program(name, program.jaxpr, settings.mesh, operands, results), free)
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


def sharding_of(pipeline: PlannedPipeline, var: Any) -> TensorSharding:
    """Returns how the devices of its stage share a value around the loss; each has scalars, and what nothing splits, whole."""
    dims = pipeline.placed.get(var) if is_array(var) else None
    return dims if dims is not None else replicated(len(var.aval.shape))
