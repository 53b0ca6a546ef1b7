"""Plans a pipelined step: where the loss is cut, how each chunk is split, and what each stage does after the loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh, replicated
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.pipeline.capture.around import SPREAD, Around, Placement, Program, programs_of
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.cut.chunks import Chunk
from spmdctx.pipeline.cut.line import is_array, needed, variables
from spmdctx.pipeline.cut.reasons import CutLine
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.programs.stacks import StoredStack, together, union_mesh
from spmdctx.pipeline.schedule.bounds import Bounds
from spmdctx.pipeline.schedule.simulate import Simulation
from spmdctx.pipeline.schedule.tasks import Schedule
from spmdctx.pipeline.stages.captured import Operand, Outcome, captured_program, with_entries
from spmdctx.pipeline.stages.plans import Planned, PlannedChunk, PlannedTask, Totals
from spmdctx.pipeline.stages.staging import Stages, Staging, twins_of


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

    `placed` has the sharding of each array around the loss on its stage. `bounds` are those of the schedule, if not None.
    `stacks` are the stacked values whose layers are leaves of the loss, as stages keep them.
    `reductions` are the programs that complete sums of gradients which no micro-batch reduces, by their chunks. `memories` is what was
    counted of a pipeline that is planned (`stages.memory`).
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
    bounds: Bounds | None = None
    notes: list[str] = field(default_factory=list)
    stacks: Sequence[StoredStack] = ()
    reductions: Mapping[int, PlannedTask] = field(default_factory=dict)
    memories: Sequence[Any] = ()

    @property
    def total_s(self) -> float:
        """The planned seconds of a step: the schedule, the reductions that wait for its end, and what follows the loss."""
        return self.simulation.makespan_s + self.reduced_s + sum(map(_round_s, self.rounds))

    @property
    def reduced_s(self) -> float:
        """The planned seconds of the reductions that wait for the end of the schedule; each stage does those of its chunks in turn."""
        turns: dict[str, float] = {}
        for own in self.reductions.values():
            turn = own.name.partition("_")[0]
            turns[turn] = max(turns.get(turn, 0.0), own.planned.plan.cost.total_s)
        return sum(turns.values())

    @cached_property
    def union(self) -> LogicalMesh:
        """The mesh of all stages."""
        return union_mesh(self.mesh, self.schedule.num_stages)

    def stages_with(self, stage: int) -> tuple[int, ...]:
        """Returns the stages of a program: all of them for SPREAD."""
        return tuple(range(self.schedule.num_stages)) if stage == SPREAD else (stage,)

    def stage_of_chunk(self, chunk: int) -> int:
        """Returns the stage of a chunk."""
        return self.schedule.stage_of[chunk]

    def readers(self, leaf: int) -> list[int]:
        """Returns the chunks that read a leaf of the loss; the first one owns it."""
        return [number for number, chunk in enumerate(self.chunks) if leaf in chunk.leaves]


def _round_s(programs: Sequence[PlannedProgram]) -> float:
    """Returns the seconds of a round: what all stages do together, and then the slowest one."""
    seconds = {True: [0.0], False: [0.0]}
    for own in programs:
        seconds[own.program.stage == SPREAD].append(own.planned.plan.cost.total_s)
    return sum(map(max, seconds.values()))


class Surrounded(NamedTuple):
    """Planned stages, and the programs of each round around their loss, which are not planned."""

    stages: Stages
    placement: Placement
    rounds: list[list[Program]]
    notes: list[str]


class _Surroundings(NamedTuple):
    """The programs around a loss, and whether all layers of each stack lie on one stage, since stages cannot share them."""

    placement: Placement
    rounds: list[list[Program]]
    notes: list[str]
    are_together: bool


def surrounded(stages: Stages) -> Surrounded:
    """Finds out what each stage does around the loss; plans of the same chunks on the same stages share it.

    Raises:
        UnsupportedError: what follows the loss mixes arrays that stages share by layers with others.
    """
    known, key = stages.loss.surroundings, tuple(stages.schedule.stage_of)
    if key not in known:
        known[key] = _surroundings(stages)
    found: _Surroundings = known[key]
    if found.are_together:
        stages = replace(stages, stacks=[together(stack) for stack in stages.stacks])
    return Surrounded(stages, found.placement, found.rounds, found.notes)


def _surroundings(stages: Stages) -> _Surroundings:
    step, around, stacks = stages.loss.step, stages.loss.around, stages.stacks
    notes, are_together = [], False
    try:
        placement = _placement(step, around, stages)
    except UnsupportedError as error:
        if not any(stack.is_spread for stack in stacks):
            raise
        stages, are_together = replace(stages, stacks=[together(stack) for stack in stacks]), True
        placement = _placement(step, around, stages)
        notes.append(f"Stages cannot share stacked parameters by layers here: {error.args[0].splitlines()[0]}")
    return _Surroundings(placement, programs_of(around, placement, stages.schedule.num_stages), notes, are_together)


def completed(staging: Staging, own: Surrounded, *, scatters: bool = False) -> PlannedPipeline:
    """Plans what a step does around its loss, whose stages are planned.

    Args:
        staging: what planned them.
        own: the stages.
        scatters: whether devices get a part each of gradients that wait for the last micro-batch to be reduced; else they get all.
    """
    stages, placement, rounds, notes = own
    step, around, mesh = stages.loss.step, stages.loss.around, stages.planned[0].mesh
    line = staging.cut_line(stages)
    pipeline = PlannedPipeline(step, around, placement, stages.schedule, stages.simulation, stages.chunks, line, stages.planned, mesh)
    pipeline.stacks = stages.stacks
    pipeline.notes += notes
    totals = Totals(staging.planner, replace(staging.settings, mesh=mesh), scatters=scatters)
    totals.plan(stages.planned, stages.schedule.stage_of, stages.loss.step.loss.paths, twins_of([own.stack for own in stages.stacks]))
    pipeline.reductions = totals.planned
    _place_leaves(pipeline, totals)
    _plan_rounds(pipeline, rounds, staging)
    return pipeline


def _placement(step: PipelinedStep, around: Around, stages: Stages) -> Placement:
    """Returns the stages of all arrays around the loss: leaves and gradients lie with the first chunk that reads them."""
    loss, chunks, schedule = step.loss, stages.chunks, stages.schedule
    owner = {leaf: schedule.stage_of[number] for number, chunk in reversed([*enumerate(chunks)]) for leaf in chunk.leaves}
    known = {var: owner[leaf] for leaf, var in enumerate(around.loss.invars) if leaf in owner and not _is_literal(var)}
    for index, var in enumerate(around.loss.outvars):
        if index in loss.gradient_of:
            known[var] = owner[loss.gradient_of[index]]
        elif index in loss.made_by:
            known[var] = _maker(chunks, schedule, loss.made_by[index])
    known.update({own.stack.whole: SPREAD if own.is_spread else own.kept[0].stage for own in stages.stacks})
    names = dict(zip(around.jaxpr.jaxpr.invars, (leaf.path for leaf in step.captured.inputs), strict=True))
    spread = [own.stack.whole for own in stages.stacks if own.is_spread and not own.stack.is_gradient]
    next_of = {var: new for new, var in _sources(step, around).items()}
    return Placement(around, known, names, needed(around.before, spread), next_of)


def _sources(step: PipelinedStep, around: Around) -> dict[Any, Any]:
    """Returns for each result that is the next value of an input the input."""
    body, outputs = around.jaxpr.jaxpr, step.captured.outputs
    pairs = zip(body.outvars, outputs, strict=True)
    return {var: body.invars[leaf.carried_from] for var, leaf in pairs if leaf.carried_from is not None and not _is_literal(var)}


def _maker(chunks: Sequence[Chunk], schedule: Schedule, result: int) -> int:
    return next(schedule.stage_of[number] for number, chunk in enumerate(chunks) if result in chunk.results)


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _place_leaves(pipeline: PlannedPipeline, totals: Totals) -> None:
    """Fills in the shardings of the loss's leaves, of its gradients, and of what stacks them."""
    loss, around = pipeline.step.loss, pipeline.around
    for leaf, var in enumerate(around.loss.invars):
        readers = pipeline.readers(leaf)
        if readers and not _is_literal(var):
            pipeline.placed[var] = pipeline.planned[readers[0]].joint.shardings[Slot(Holds.LEAF, leaf)]
    for index, leaf in loss.gradient_of.items():
        pipeline.placed[around.loss.outvars[index]] = totals.sharding(pipeline.readers(leaf)[0], leaf)
    for own in pipeline.stacks:
        first = own.stack.parts[0].leaf
        number = pipeline.readers(first)[0]
        slot = Slot(Holds.LEAF, first)
        dims = totals.sharding(number, first) if own.stack.is_gradient else pipeline.planned[number].joint.shardings[slot]
        # Unless all stages have as many, layers may be fewer than devices: then the devices of a stage have them all.
        layers = dims[0] if own.is_at_home else ()
        pipeline.placed[own.stack.whole] = ((pipeline.union.names[0], *layers) if own.is_spread else layers, *dims[1:])


def _plan_rounds(pipeline: PlannedPipeline, rounds: Sequence[Sequence[Program]], staging: Staging) -> None:
    """Plans what each stage does after the loss; a program takes arrays as the ones before it have left them."""
    around, captured, one = pipeline.around, pipeline.step.captured, staging.settings
    inputs = dict(zip(around.jaxpr.jaxpr.invars, captured.inputs, strict=True))
    sources = _sources(pipeline.step, around)
    count = pipeline.union.num_devices
    together = replace(one, mesh=pipeline.union, num_devices=count, context=one.context.with_checked({"device_num": count}))
    settings_of = {True: together, False: replace(one, mesh=pipeline.mesh)}
    results = set(variables(around.jaxpr.jaxpr.outvars))
    reused = _Reused(rounds, sources, {var for var, leaf in inputs.items() if leaf.donated} - results)
    for number, programs in enumerate(rounds):
        found = []
        for program in programs:
            donated, by_all = reused.by(number, program), program.stage == SPREAD
            operands = [_operand(var, inputs, pipeline.placed, index in donated) for index, var in enumerate(program.inputs)]
            places = {var: index for index, var in enumerate(program.inputs)}
            outcomes = [_outcome(var, sources, places, pipeline.placed) for var in program.outputs]
            if by_all:
                operands = [own._replace(layers=_layer_axes(pipeline, var)) for own, var in zip(operands, program.inputs, strict=True)]
                outcomes = [own._replace(layers=_layer_axes(pipeline, var)) for own, var in zip(outcomes, program.outputs, strict=True)]
            name, settings = f"after{number}_{'all' if by_all else program.stage}", settings_of[by_all]
            free = with_entries(settings, [None] * sum(operand.role is Role.BATCH for operand in operands))
            planned = staging.planner(captured_program(name, program.jaxpr, settings.mesh, operands, outcomes, program.built), free)
            graph, values = planned.program.graph, planned.assignment.values
            for var, value in (*zip(program.inputs, graph.inputs, strict=True), *zip(program.outputs, graph.outputs, strict=True)):
                if is_array(var) and value >= 0:
                    pipeline.placed.setdefault(var, values[value])
            found.append(PlannedProgram(program, planned, name, donated))
        pipeline.rounds.append(found)


def _layer_axes(pipeline: PlannedPipeline, var: Any) -> AxisNames:
    """Returns the axes that split a value which all stages share along its layers, if it has these."""
    has_layers = is_array(var) and var.aval.shape[0] in {own.num_layers for own in pipeline.stacks if own.is_spread}
    return pipeline.union.names[:1] if has_layers else ()


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
    """Returns the stage on which a value around the loss lies; scalars, and what all stages share by layers, begin on the first one."""
    return max(pipeline.placement.stage_of.get(var, 0), 0)


def is_spread(pipeline: PlannedPipeline, var: Any) -> bool:
    """Returns whether all stages share a value by layers."""
    return pipeline.placement.stage_of.get(var) == SPREAD


def sharding_of(pipeline: PlannedPipeline, var: Any) -> TensorSharding:
    """Returns how devices share a value around the loss: those of its stage, or, by the mesh `union`, all.

    Each device has scalars, and what nothing splits, whole.
    """
    dims = pipeline.placed.get(var) if is_array(var) else None
    return dims if dims is not None else replicated(len(var.aval.shape))


def mesh_of(pipeline: PlannedPipeline, var: Any) -> LogicalMesh:
    """Returns the mesh for which `sharding_of` gives a sharding."""
    return pipeline.union if is_spread(pipeline, var) else pipeline.mesh


def foreign_operands(pipeline: PlannedPipeline, program: Program) -> list[Any]:
    """Returns the arrays that a program after the loss takes from other stages."""
    stage_of = pipeline.placement.stage_of
    return [var for var in program.inputs if stage_of.get(var, program.stage) != program.stage]
