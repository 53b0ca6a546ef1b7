"""Walks a planned pipeline without arrays, so that what a call would do can be counted where none can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from spmdctx.pipeline.cut.line import num_bytes
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.run.compiled import CompiledChunk, CompiledTask
from spmdctx.pipeline.run.walk import Counts, Held, Walk
from spmdctx.pipeline.stages.plans import PlannedChunk, PlannedTask
from spmdctx.pipeline.stages.whole import PlannedPipeline


class _Block(NamedTuple):
    """Stands for an array."""

    nbytes: int


def dry_counts(pipeline: PlannedPipeline) -> Counts:
    """Returns what the walk of one call does with micro-batches; what is moved around them is not counted."""
    chunks: Any = [_chunk(own) for own in pipeline.planned]
    walk = Walk(chunks, pipeline.schedule, pipeline.simulation.order, carried_of(pipeline), lambda values, _: values)
    walk.run([_held(own, pipeline.schedule.num_micro) for own in pipeline.planned])
    return walk.counts


def carried_of(pipeline: PlannedPipeline) -> list[Mapping[int, int]]:
    """Returns, by chunk, the leaves that a micro-batch takes from the one before, and the results that are their next values."""
    return [
        {leaf: result for leaf, result in pipeline.step.loss.carried.items() if leaf in chunk.leaves and result in chunk.results}
        for chunk in pipeline.chunks
    ]


def _chunk(planned: PlannedChunk) -> CompiledChunk:
    slots = {slot: slot for task in planned.tasks.values() for slot in (*task.program.inputs, *task.program.outputs)}
    shardings: Any = {**slots, **{_of(slot): slot for slot in slots}}
    return CompiledChunk({kind: _task(task) for kind, task in planned.tasks.items()}, shardings, planned)


def _of(slot: Slot) -> Slot:
    return Slot(Holds.OF_LEAVING, slot.number) if slot.holds is Holds.LEAVING else slot


def _task(task: PlannedTask) -> CompiledTask:
    made = [_Block(num_bytes(var)) for var in task.program.jaxpr.jaxpr.outvars]
    run: Any = lambda *_: made  # noqa: E731  it stands for a compiled program
    return CompiledTask(run, task.program.inputs, task.program.outputs)


def _held(planned: PlannedChunk, num_micro: int) -> Held:
    step: dict[Slot, Any] = {}
    for task in planned.tasks.values():
        for slot, var in zip(task.program.inputs, task.program.jaxpr.jaxpr.invars, strict=True):
            if slot.holds in (Holds.LEAF, Holds.SUM):
                step[slot] = _Block(num_bytes(var))
    return Held(step, {micro: {} for micro in range(num_micro)})
