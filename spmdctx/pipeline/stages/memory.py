"""What lies on the devices of each stage whenever a program runs: state, sums of gradients, and what micro-batches in flight hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spmdctx.ir.mesh import LogicalMesh, local_shape
from spmdctx.ir.sharding import TensorSharding
from spmdctx.pipeline.cut.line import is_array, num_bytes, variables
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.schedule.tasks import Kind, Task
from spmdctx.pipeline.stages.homes import homes_of
from spmdctx.pipeline.stages.plans import PlannedChunk, PlannedTask
from spmdctx.pipeline.stages.whole import PlannedPipeline, PlannedProgram, foreign_operands, mesh_of, sharding_of, stages_of


class StageMemory(NamedTuple):
    """Bytes on one device of a stage.

    Attributes:
        state_bytes: inputs of the step that lie there, copies of those that lie elsewhere, and sums of gradients.
        kept_bytes: the most that micro-batches in flight hold.
        live_bytes: for each program, the most that lies there when it begins, its own operands among it.
        peak_bytes: the planned peak, with what programs make and need meanwhile.
        peaks: that of each program.
    """

    state_bytes: int
    kept_bytes: int
    live_bytes: Mapping[str, int]
    peak_bytes: int
    peaks: Mapping[str, int]


def memory_of(pipeline: PlannedPipeline) -> Sequence[StageMemory]:
    """Returns the memory of each stage, by the order in which the pipeline runs its tasks; it is counted once."""
    if not pipeline.memories:
        pipeline.memories = _counted(pipeline)
    return pipeline.memories


def _counted(pipeline: PlannedPipeline) -> list[StageMemory]:
    stages = [_Stage() for _ in range(pipeline.schedule.num_stages)]
    chunks = [_Chunk(own, pipeline, number) for number, own in enumerate(pipeline.planned)]
    home = _Home(pipeline)
    for var, lies_on in homes_of(pipeline).items():
        for stage in lies_on:
            stages[stage].state += home.size(var)
    for number, chunk in enumerate(chunks):
        chunk.begin(stages[pipeline.stage_of_chunk(number)], home)
    for task in pipeline.simulation.order:
        _run(task, pipeline, chunks, stages)
    state = [own.state + own.held for own in stages]
    for number, reduction in pipeline.reductions.items():
        chunks[number].complete(reduction, stages[pipeline.stage_of_chunk(number)])
    for var, lies_on in _gradients(pipeline):
        for stage in lies_on:
            stages[stage].after += home.size(var)
    for one, gone in _last_reads(pipeline):
        for stage in pipeline.stages_with(one.program.stage):
            # Copies of what other stages have are gone when the program ends, and what they have stays.
            copied = sum(home.size(var) for var in foreign_operands(pipeline, one.program))
            _run_after(one, [var for var in gone if pipeline.placement.stage_of.get(var) == one.program.stage], copied, home, stages[stage])
    return [
        StageMemory(before, own.most_kept, own.live, max(own.peaks.values(), default=0), own.peaks)
        for before, own in zip(state, stages, strict=True)
    ]


def _gradients(pipeline: PlannedPipeline) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Gives the gradients that the step reads, with the stages that have them; layers are parts of what stacks them."""
    own = [one for one in pipeline.stacks if one.stack.is_gradient]
    parts = {part.var for one in own for part in one.stack.parts}
    for one in own:
        yield one.stack.whole, tuple(rows.stage for rows in one.kept)
    for index, var in enumerate(pipeline.around.loss.outvars):
        if index in pipeline.step.loss.gradient_of and var not in parts:
            yield var, (stages_of(pipeline, var),)


class _Stage:
    """The bytes on one device of a stage: state of the step, what the chunks hold beside, and what is kept for micro-batches."""

    def __init__(self) -> None:
        self.state = self.held = self.waiting = self.kept = self.after = 0
        self.most_kept = 0
        self.live: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()

    def runs(self, name: str, extra: int, *, is_after: bool = False) -> None:
        """Notes what lies there when a program begins, and the `extra` bytes that it adds meanwhile."""
        live = self.state + (self.after if is_after else self.held + self.waiting + self.kept)
        self.live[name] = max(self.live[name], live)
        self.peaks[name] = max(self.peaks[name], live + extra)


class _Home:
    """Where the inputs of the step lie, and the values after the loss."""

    def __init__(self, pipeline: PlannedPipeline) -> None:
        self._pipeline = pipeline
        self.copied = {part.var for own in pipeline.stacks for part in own.copied}

    def sharding(self, var: Any) -> TensorSharding:
        """Returns the sharding of a value on its stage."""
        return sharding_of(self._pipeline, var)

    def size(self, var: Any) -> int:
        """Returns its bytes on one device."""
        return _local(var, self.sharding(var), mesh_of(self._pipeline, var))

    def has(self, var: Any, stage: int, dims: TensorSharding) -> bool:
        """Returns whether a stage has a leaf of the loss in a sharding anyway, so that its chunks need no copy."""
        is_there = not hasattr(var, "val") and var not in self.copied
        return is_there and stages_of(self._pipeline, var) == stage and self.sharding(var) == dims


class _Chunk:
    """The arrays of a chunk, by slot."""

    def __init__(self, planned: PlannedChunk, pipeline: PlannedPipeline, number: int) -> None:
        self.planned, self.number = planned, number
        self._pipeline = pipeline
        self.size: dict[Slot, int] = {}
        self.dims: dict[Slot, TensorSharding] = {}
        for task in planned.tasks.values():
            self.dims.update(task.shardings)
            body = task.program.jaxpr.jaxpr
            for slot, var in (*zip(task.program.inputs, body.invars, strict=True), *zip(task.program.outputs, body.outvars, strict=True)):
                self.size[slot] = _local(var, self.dims[slot], pipeline.mesh)
        self.micro: dict[int, dict[Slot, int]] = {}
        self._begun = 0

    def begin(self, stage: _Stage, home: _Home) -> None:
        """Adds what the chunk holds before its first task: sums, copies of leaves that lie elsewhere, and its parts of the batch."""
        loss, atoms = self._pipeline.step.loss, self._pipeline.around.loss.invars
        own_stage = self._pipeline.stage_of_chunk(self.number)
        for slot, size in self.size.items():
            if slot.holds is Holds.SUM:
                self._begun += size
            elif slot.holds is Holds.LEAF and (loss.operands[slot.number].batch_dim is not None or slot.number in loss.folded):
                for index in range(loss.num_micro):
                    self.micro.setdefault(index, {})[slot] = size
                stage.waiting += size * loss.num_micro
            elif slot.holds is Holds.LEAF:
                self._begun += 0 if home.has(atoms[slot.number], own_stage, self.dims[slot]) else size
        stage.held += self._begun

    def complete(self, reduction: PlannedTask, stage: _Stage) -> None:
        """Runs the program that completes sums, which are gone when it ends."""
        sums = sum(self.size[slot] for slot in reduction.program.inputs)
        stage.runs(reduction.name, max(0, reduction.planned.plan.cost.memory_bytes - sums))
        dims, body = reduction.shardings, reduction.program.jaxpr.jaxpr
        made = zip(reduction.program.outputs, body.outvars, strict=True)
        stage.held += sum(_local(var, dims[slot], self.planned.mesh) for slot, var in made) - sums

    def extra(self, kind: Kind) -> int:
        """Returns what a program adds to its operands while it runs."""
        task = self.planned.tasks[kind]
        planned: int = task.planned.plan.cost.memory_bytes
        return max(0, planned - sum(self.size[slot] for slot in task.program.inputs))


def _run(task: Task, pipeline: PlannedPipeline, chunks: list[_Chunk], stages: list[_Stage]) -> None:
    """Runs one task on the stages' bytes."""
    own, stage = chunks[task.chunk], stages[pipeline.stage_of_chunk(task.chunk)]
    planned = own.planned.tasks[task.kind]
    stage.runs(planned.name, own.extra(task.kind))
    arrays = own.micro.setdefault(task.micro, {})
    for slot in planned.program.outputs:
        if slot.holds is Holds.RESULT:
            stage.held += own.size[slot]
        elif slot.holds is not Holds.SUM:
            arrays[slot] = own.size[slot]
            stage.kept += own.size[slot]
    if task.kind is Kind.FORWARD:
        # What the batch gives the micro-batch, and what came before, is now held for its backward pass.
        begun = sum(size for slot, size in arrays.items() if slot.holds in (Holds.LEAF, Holds.ENTERING))
        stage.waiting -= begun
        stage.kept += begun
    for source, target, reader in _handed_on(task):
        for slot in [slot for slot in arrays if slot.holds is source]:
            stage.kept -= arrays.pop(slot)
            if 0 <= reader < len(chunks):
                _receive(chunks[reader], stages[pipeline.stage_of_chunk(reader)], task, Slot(target, slot.number))
    stage.most_kept = max(stage.most_kept, stage.kept)
    if task.kind in (Kind.BACKWARD, Kind.WEIGHT):
        stage.kept -= sum(own.micro.pop(task.micro).values())


def _handed_on(task: Task) -> Iterator[tuple[Holds, Holds, int]]:
    if task.kind is Kind.FORWARD:
        yield Holds.LEAVING, Holds.ENTERING, task.chunk + 1
    elif task.kind is not Kind.WEIGHT:
        yield Holds.OF_ENTERING, Holds.OF_LEAVING, task.chunk - 1


def _receive(reader: _Chunk, stage: _Stage, task: Task, slot: Slot) -> None:
    reader.micro.setdefault(task.micro, {})[slot] = reader.size[slot]
    if slot.holds is Holds.ENTERING:
        stage.waiting += reader.size[slot]
    else:
        stage.kept += reader.size[slot]


def _last_reads(pipeline: PlannedPipeline) -> Iterator[tuple[PlannedProgram, list[Any]]]:
    """Gives each program after the loss, with the arrays made in the step that nothing reads behind it."""
    programs = [one for own in pipeline.rounds for one in own]
    body = pipeline.around.jaxpr.jaxpr
    stay = {*variables(body.outvars), *body.invars}
    last = {var: place for place, one in enumerate(programs) for var in one.program.inputs}
    for place, one in enumerate(programs):
        yield one, [var for var in one.program.inputs if last[var] == place and var not in stay and is_array(var)]


def _run_after(one: PlannedProgram, gone: Sequence[Any], copied: int, home: _Home, stage: _Stage) -> None:
    """Runs a program after the loss: its results stay until nothing reads them any more, and reused operands are gone."""
    program = one.program
    operands = sum(home.size(var) for var in program.inputs)
    stage.after += copied
    stage.runs(one.name, max(0, one.planned.plan.cost.memory_bytes - operands), is_after=True)
    stage.after -= copied
    stage.after += sum(home.size(var) for var in program.outputs)
    stage.state -= sum(home.size(program.inputs[place]) for place in one.donated)
    stage.after -= sum(map(home.size, gone))


def _local(var: Any, dims: TensorSharding, mesh: LogicalMesh) -> int:
    """Returns the bytes of a value, or of all values of a type, on one device."""
    shape = tuple(getattr(var.aval, "shape", ()))
    whole = math.prod(shape)
    return num_bytes(var) * math.prod(local_shape(shape, dims, mesh)) // whole if whole else 0
