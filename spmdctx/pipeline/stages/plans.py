"""Plans every chunk: first both passes together, which decides shardings, then each program within them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from spmdctx.cost.price.directives import Directives
from spmdctx.errors import InfeasibleError
from spmdctx.ir.analysis.loop_sums import reduced_dtype
from spmdctx.ir.excerpt import excerpt
from spmdctx.ir.graph import LITERAL, Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.pipeline.programs.passes import Passes
from spmdctx.pipeline.programs.reduction import HeldSum, reduction_program
from spmdctx.pipeline.programs.slots import Holds, Slot, TaskProgram
from spmdctx.pipeline.programs.split import split_backward
from spmdctx.pipeline.schedule.tasks import Costs, Kind
from spmdctx.pipeline.stages.captured import Between, LossLeaf, Operand, Outcome, captured_program, captured_task, with_entries
from spmdctx.search.problem.orbits import Precedents
from spmdctx.search.select import Shared
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings


class Planned(Protocol):
    """What the planner gives for a captured program."""

    @property
    def plan(self) -> Any:
        """The plan."""

    @property
    def program(self) -> Program:
        """The program that it is for."""

    @property
    def assignment(self) -> Assignment:
        """The shardings."""

    @property
    def mesh(self) -> LogicalMesh:
        """The mesh that they are for."""

    @property
    def directives(self) -> Directives:
        """What the program says besides shardings."""


class Planner(Protocol):
    """Plans a captured program; if `is_rough`, only to tell how plans compare. It may start from the plans of others, the `precedents`.

    Splits that are `given` are kept. What no budget changes is taken from `begun`, and left there.
    """

    def __call__(
        self,
        captured: Captured,
        settings: Settings,
        /,
        *,
        is_rough: bool = False,
        precedents: Precedents | None = None,
        given: Assignment | None = None,
        begun: Shared | None = None,
    ) -> Planned:
        """Returns the plan."""


REDUCTION = "reduce"
"""The first letters of the names of programs that complete gradients after the last micro-batch."""


@dataclass(frozen=True)
class PlannedTask:
    """A program of a chunk with its plan, and its name."""

    program: TaskProgram
    planned: Planned
    name: str = ""

    @cached_property
    def shardings(self) -> dict[Slot, TensorSharding]:
        """The sharding of each operand and result."""
        graph, values = self.planned.program.graph, self.planned.assignment.values
        found = dict(zip(self.program.inputs, (values[value] for value in graph.inputs), strict=True))
        made = zip(self.program.outputs, graph.outputs, self.program.jaxpr.out_avals, strict=True)
        return {**found, **{slot: values[value] if value >= 0 else ((),) * len(aval.shape) for slot, value, aval in made}}


@dataclass(frozen=True)
class PlannedChunk:
    """A chunk with the plan of both passes together, and of each of its programs."""

    passes: Passes
    joint: PlannedTask
    tasks: Mapping[Kind, PlannedTask]

    @cached_property
    def held(self) -> dict[int, HeldSum]:
        """The sums of gradients that no micro-batch reduces, by their leaves."""
        return {leaf: own for task in self.tasks.values() for leaf, own in _held_sums(task).items()}

    @property
    def mesh(self) -> LogicalMesh:
        """The mesh of the chunk's stage."""
        return self.joint.planned.mesh

    @property
    def costs(self) -> Costs:
        """The planned seconds of each kind of task; of those that the chunk does not run, 0."""
        seconds = {kind: task.planned.plan.cost.total_s for kind, task in self.tasks.items()}
        return Costs(*(seconds.get(kind, 0.0) for kind in Kind))


class ChunkPlanner:
    """Plans the chunks of a pipeline one after the other; what leaves one enters the next in the same sharding.

    Args:
        planner: plans a captured program.
        settings: of one stage: its number of devices, and its mesh if that is decided.
        leaves: the inputs of the loss.
        splits_backward: whether the gradients of weights are tasks of their own.
        runs: the micro-batches after which gradients are complete, if they may wait until then to be reduced; else 1.
        carried: for each leaf that a micro-batch takes from the one before, the result that is its next value.
        num_limited: of the chunks, the first ones which keep to the memory of the settings; None if all do.
    """

    def __init__(
        self,
        planner: Planner,
        settings: Settings,
        leaves: Sequence[LossLeaf],
        *,
        splits_backward: bool,
        runs: int = 1,
        carried: Mapping[int, int] = MappingProxyType({}),
        num_limited: int | None = None,
    ) -> None:
        self._planner, self._settings, self._leaves, self._splits = planner, settings, leaves, splits_backward
        self._num_limited = math.inf if num_limited is None else num_limited
        context = settings.context
        is_whole = context.enable_parallel_optimizer and not context.parallel_optimizer_config.gradient_accumulation_shard
        self._number = 0
        self._between = Between(runs, Role.ARGUMENT if is_whole else Role.OPTIMIZER, carried)

    def plan(self, chunks: Sequence[Passes], twins: Mapping[int, int] = MappingProxyType({})) -> list[PlannedChunk]:
        """Returns the planned chunks. The mesh is that of the chunk in the middle, if none is decided, or of one that does not fit there.

        Args:
            chunks: the passes of each.
            twins: for leaves that are split as others, with their gradients, these other ones, which an earlier chunk reads.
        """
        mesh = self._settings.mesh
        if mesh is not None:
            return self._on_mesh(chunks, twins)
        mesh = self._decide_mesh(chunks[len(chunks) // 2])
        try:
            return self._on_mesh(chunks, twins)
        except InfeasibleError:
            if self._decide_mesh(chunks[self._number]) == mesh:
                raise
        return self._on_mesh(chunks, twins)

    def _decide_mesh(self, chunk: Passes) -> LogicalMesh:
        """Takes the mesh that a rough plan of a chunk has; nothing else of it is kept."""
        self._settings = replace(self._settings, mesh=None)
        mesh = self._planned("pipeline_mesh", chunk.joint, {}, is_rough=True).planned.mesh
        self._settings = replace(self._settings, mesh=mesh)
        return mesh

    def _on_mesh(self, chunks: Sequence[Passes], twins: Mapping[int, int]) -> list[PlannedChunk]:
        joints = [own.joint for own in chunks]
        found: list[PlannedChunk] = []
        shared: dict[Slot, TensorSharding] = {}
        for number, (own, joint) in enumerate(zip(chunks, joints, strict=True)):
            self._number = number
            pins = dict(shared)
            if found:
                before = found[-1].joint.shardings
                pins.update({Slot(Holds.ENTERING, slot.number): dims for slot, dims in before.items() if slot.holds is Holds.LEAVING})
            pins.update(_as_twins(joint, twins, found))
            with nullcontext() if number < self._num_limited else self._without_room():
                planned = self._planned(f"pipeline_chunk{number}", joint, pins)
                found.append(self._chunk(number, own, planned))
            shared.update({slot: dims for slot, dims in planned.shardings.items() if slot.holds is Holds.LEAF})
        return found

    def _chunk(self, number: int, passes: Passes, joint: PlannedTask) -> PlannedChunk:
        pins = dict(joint.shardings)
        for slot, dims in joint.shardings.items():
            # What goes back is split as what came.
            if slot.holds in (Holds.ENTERING, Holds.LEAVING):
                pins[Slot(Holds.OF_ENTERING if slot.holds is Holds.ENTERING else Holds.OF_LEAVING, slot.number)] = dims
        forward = self._planned_as_pinned(f"forward{number}", passes.forward, pins, joint)
        pins.update({slot: dims for slot, dims in forward.shardings.items() if slot.holds is Holds.KEPT})
        tasks = {Kind.FORWARD: forward}
        behind = len(forward.planned.program.graph.ops)
        for program in split_backward(passes.backward) if self._splits else [passes.backward]:
            task = tasks[program.kind] = self._planned_as_pinned(f"{program.kind.name.lower()}{number}", program, pins, joint, behind)
            pins.update({slot: dims for slot, dims in task.shardings.items() if slot.holds is Holds.LINK})
        return PlannedChunk(passes, joint, tasks)

    def _planned_as_pinned(
        self, name: str, program: TaskProgram, pins: Mapping[Slot, TensorSharding], joint: PlannedTask, first: int = 0
    ) -> PlannedTask:
        """Plans a task of a chunk. If both passes have its ops in a row from `first` on, it is split as there; else the rest is searched.

        Of what the task takes beyond the chunk's room, the stage has to know.
        """
        try:
            return self._planned(name, program, pins, joint=joint, first=first)
        except InfeasibleError:
            if self._settings.memory_bytes is None:
                raise
        with self._without_room():
            return self._planned(name, program, pins)

    @contextmanager
    def _without_room(self) -> Iterator[None]:
        limited, self._settings = self._settings, replace(self._settings, memory_bytes=None)
        try:
            yield
        finally:
            self._settings = limited

    def _planned(
        self,
        name: str,
        program: TaskProgram,
        pins: Mapping[Slot, TensorSharding],
        *,
        is_rough: bool = False,
        joint: PlannedTask | None = None,
        first: int = 0,
    ) -> PlannedTask:
        own = {slot: dims for slot, dims in pins.items() if slot in program.inputs or slot in program.outputs}
        captured = captured_task(name, program, self._leaves, self._settings.mesh, own, self._between)
        batch = [slot for slot, leaf in zip(program.inputs, captured.inputs, strict=True) if leaf.role is Role.BATCH]
        # What is decided, or comes from another chunk, needs no entry.
        is_free = [slot.holds is Holds.LEAF and slot not in own for slot in batch]
        entries = [self._leaves[slot.number].strategy if free else None for slot, free in zip(batch, is_free, strict=True)]
        settings = with_entries(self._settings, entries)
        given = None if joint is None else self._given(captured, program, own, joint, first)
        return PlannedTask(program, self._planner(captured, settings, is_rough=is_rough, given=given), name)

    def _given(
        self, captured: Captured, program: TaskProgram, pins: Mapping[Slot, TensorSharding], joint: PlannedTask, first: int
    ) -> Assignment | None:
        """Returns the splits of a task as both passes have them from an op on; None if a search decides what is not pinned."""
        context, whole = self._settings.context, joint.planned
        if context.parallel_mode != "auto_parallel" or context.enable_parallel_optimizer or self._settings.num_devices == 1:
            return None
        graph = captured.built_for(self._settings.topology.compiler).graph
        slots = (*zip(program.inputs, graph.inputs, strict=True), *zip(program.outputs, graph.outputs, strict=True))
        given = {value: pins[slot] for slot, value in slots if slot in pins and value != LITERAL}
        return excerpt(whole.program.graph, whole.assignment, first, graph, given)


def _as_twins(own: TaskProgram, twins: Mapping[int, int], chunks: Sequence[PlannedChunk]) -> dict[Slot, TensorSharding]:
    """Returns the shardings of layers that are split as others of the same stack, and of their gradients, as earlier chunks have these.

    Along the layers they are split only if they are as many.
    """
    found = {}
    for slot, aval in own.avals.items():
        twin = Slot(slot.holds, twins[slot.number]) if slot.holds in (Holds.LEAF, Holds.SUM) and slot.number in twins else slot
        joint = next((chunk.joint for chunk in chunks if twin != slot and twin in chunk.joint.program.avals), None)
        if joint is not None:
            first, *rest = joint.shardings[twin]
            found[slot] = (first if joint.program.avals[twin].shape[0] == aval.shape[0] else (), *rest)
    return found


def _held_sums(task: PlannedTask) -> dict[int, HeldSum]:
    """Returns the sums that a program leaves unreduced, by their leaves."""
    planned, shardings, avals, found = task.planned, task.shardings, task.program.avals, {}
    sums, graph = planned.directives.loop_sums, planned.program.graph
    for slot, value in zip(task.program.outputs, graph.outputs, strict=True):
        if slot.holds is Holds.SUM and value in sums.totals:
            total = sums.totals[value]
            dtype = reduced_dtype(graph, value, total.terms, planned.directives.widened)
            found[slot.number] = HeldSum(total.axes, shardings[slot], avals[slot], dtype)
    return found


class Totals:
    """The programs that complete the sums of gradients which no micro-batch reduces, by chunk.

    Gradients of one parameter, and of layers of one stack, are split alike.

    Args:
        planner: plans a captured program.
        settings: of one stage.
        scatters: whether devices that add to a sum get a part of the total each, where it divides; else each gets all of it.
    """

    def __init__(self, planner: Planner, settings: Settings, *, scatters: bool) -> None:
        # There is nothing to search: the reduction is the only one that both shardings allow.
        own = settings.context.with_checked({"parallel_mode": "semi_auto_parallel"})
        self._planner, self._settings, self._scatters = planner, replace(settings, context=own), scatters
        self.planned: dict[int, PlannedTask] = {}
        self._chunks: list[PlannedChunk] = []

    def plan(self, chunks: Sequence[PlannedChunk], stage_of: Sequence[int], paths: Sequence[str], twins: Mapping[int, int]) -> None:
        """Plans the programs of all chunks, which lie on some stages; `paths` name the leaves, for `twins` see `ChunkPlanner.plan`."""
        for number, chunk in enumerate(chunks):
            if chunk.held:
                name = f"{REDUCTION}{stage_of[:number].count(stage_of[number])}_{stage_of[number]}"
                program, operands, results = reduction_program(chunk.held, chunk.mesh), [], []
                for leaf, own in chunk.held.items():
                    known = self._of_twin(own, leaf, twins)
                    is_layer = leaf in twins or leaf in twins.values()
                    operands.append(Operand(f"gradient of {paths[leaf]}", Role.ARGUMENT, (own.axes, *own.dims)))
                    results.append(
                        Outcome(f"gradient of {paths[leaf]}", self._split(own, chunk.mesh, is_layer) if known is None else known)
                    )
                captured = captured_program(name, program.jaxpr, chunk.mesh, operands, results)
                self.planned[number] = PlannedTask(program, self._planner(captured, with_entries(self._settings, ())), name)
            self._chunks.append(chunk)

    def sharding(self, number: int, leaf: int) -> TensorSharding:
        """Returns how the devices of a chunk share the gradient of a leaf when it is complete."""
        chunk = self._chunks[number]
        if leaf in chunk.held:
            return self.planned[number].shardings[Slot(Holds.TOTAL, leaf)]
        return chunk.joint.shardings[Slot(Holds.SUM, leaf)]

    def _split(self, own: HeldSum, mesh: LogicalMesh, is_layer: bool) -> TensorSharding:
        """Returns the sharding of a total; layers are not split."""
        if self._scatters:
            for place in range(int(is_layer), len(own.dims)):
                names = (*own.dims[place], *own.axes)
                if own.aval.shape[place] % mesh.num_slices(names) == 0:
                    return (*own.dims[:place], names, *own.dims[place + 1 :])
        return own.dims

    def _of_twin(self, own: HeldSum, leaf: int, twins: Mapping[int, int]) -> TensorSharding | None:
        """Returns the sharding that the gradient of the same parameter, or of other layers of its stack, has in an earlier chunk."""
        twin = twins.get(leaf, leaf)
        number = next((number for number, chunk in enumerate(self._chunks) if twin in chunk.passes.weights), None)
        if number is None:
            return None
        dims = self.sharding(number, twin)
        if twin == leaf or self._chunks[number].joint.program.avals[Slot(Holds.SUM, twin)].shape[0] == own.aval.shape[0]:
            return dims
        return ((), *dims[1:])
