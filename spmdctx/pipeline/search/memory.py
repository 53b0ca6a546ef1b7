"""The memory of a stage: what lies there from step to step, what micro-batches in flight keep, and what its programs need beside it."""

from __future__ import annotations

from typing import NamedTuple

from spmdctx.ir.mesh import replicated
from spmdctx.pipeline.capture.around import is_array
from spmdctx.pipeline.programs.slots import Holds
from spmdctx.pipeline.stages.plans import PlannedChunk
from spmdctx.pipeline.stages.sizes import device_bytes, slot_bytes
from spmdctx.pipeline.stages.whole import PlannedPipeline, stages_of

_KEPT = (Holds.KEPT, Holds.ENTERING)


class StageMemory(NamedTuple):
    """Bytes of one device of a stage.

    Attributes:
        state: arguments of the step that lie there, copies of leaves that lie elsewhere, and sums of gradients.
        kept: of all micro-batches in flight.
        program: what the largest program of a micro-batch needs beside these.
        after: what the largest program after the loss needs beside the state.
    """

    state: int
    kept: int
    program: int
    after: int

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return self.state + max(self.kept + self.program, self.after)


def stage_memory(pipeline: PlannedPipeline, stage: int) -> StageMemory:
    """Returns the planned memory of a stage."""
    chunks = [chunk for number, chunk in enumerate(pipeline.planned) if pipeline.stage_of_chunk(number) == stage]
    in_flight = pipeline.simulation.in_flight[stage]
    kept = max(sum(slot_bytes(chunk, _KEPT).values()) for chunk in chunks)
    sums = sum(sum(slot_bytes(chunk, (Holds.SUM,)).values()) for chunk in chunks)
    state = _arguments(pipeline, stage) + _copies(pipeline, stage, chunks) + sums
    program = max(_beside(chunk) for chunk in chunks)
    return StageMemory(state, in_flight * kept, program, _after(pipeline, stage))


def most_bytes(pipeline: PlannedPipeline) -> int:
    """Returns the planned peak of the fullest stage."""
    return max(stage_memory(pipeline, stage).peak for stage in range(pipeline.schedule.num_stages))


def _arguments(pipeline: PlannedPipeline, stage: int) -> int:
    own = [var for var in pipeline.around.jaxpr.jaxpr.invars if is_array(var) and stages_of(pipeline, var) == stage]
    return sum(device_bytes(var.aval, pipeline.placed.get(var, replicated(len(var.aval.shape))), pipeline.mesh) for var in own)


def _copies(pipeline: PlannedPipeline, stage: int, chunks: list[PlannedChunk]) -> int:
    """Returns the bytes of leaves that the stage's chunks have, and that lie on another stage or are computed before the loss."""
    loss, invars = pipeline.step.loss, pipeline.around.loss.invars
    arguments = set(pipeline.around.jaxpr.jaxpr.invars)
    total = 0
    for chunk in chunks:
        for slot, size in slot_bytes(chunk, (Holds.LEAF,)).items():
            is_of_batch = loss.operands[slot.number].batch_dim is not None
            var = invars[slot.number]
            is_here = not hasattr(var, "val") and var in arguments and stages_of(pipeline, var) == stage
            total += loss.num_micro * size if is_of_batch else 0 if is_here else size
    return total


def _beside(chunk: PlannedChunk) -> int:
    """Returns what the largest program of a chunk needs beside leaves, sums and what is kept."""
    sizes = slot_bytes(chunk, (Holds.LEAF, Holds.SUM, *_KEPT))
    needed = [0]
    for task in chunk.tasks.values():
        planned: int = task.planned.plan.cost.memory_bytes
        needed.append(planned - sum(sizes.get(slot, 0) for slot in task.program.inputs))
    return max(needed)


def _after(pipeline: PlannedPipeline, stage: int) -> int:
    """Returns what the largest program after the loss needs beside its operands."""
    needed = [0]
    for programs in pipeline.rounds:
        for own in programs:
            if own.program.stage == stage:
                operands = [var for var in own.program.inputs if is_array(var)]
                held = sum(
                    device_bytes(var.aval, pipeline.placed.get(var, replicated(len(var.aval.shape))), pipeline.mesh) for var in operands
                )
                needed.append(max(0, own.planned.plan.cost.memory_bytes - held))
    return max(needed)
