"""Assembles the plan of a pipeline from its planned programs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.pipeline.plan import PipelinePlan, StagePlan, Transfer
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.schedule.bounds import bubble_of
from spmdctx.pipeline.schedule.tasks import Costs, Kind
from spmdctx.pipeline.stages.plans import PlannedChunk
from spmdctx.pipeline.stages.whole import PlannedPipeline


def assembled(pipeline: PlannedPipeline, mode: str, topology: str, notes: Iterable[str] = ()) -> PipelinePlan:
    """Returns the plan that users see."""
    schedule = pipeline.schedule
    stages = tuple(_stage(pipeline, stage) for stage in range(schedule.num_stages))
    rounds = schedule.num_chunks // schedule.num_stages
    mean = Costs(*(sum(own) / schedule.num_stages for own in zip(*(chunk.costs for chunk in pipeline.planned), strict=True)))
    return PipelinePlan(
        mode,
        topology,
        pipeline.mesh,
        pipeline.simulation,
        bubble_of(schedule.name, schedule.num_stages, schedule.num_micro, mean, rounds),
        stages,
        tuple(_transfers(pipeline)),
        tuple(dict.fromkeys((*pipeline.step.captured.notes, *pipeline.notes, *notes))),
    )


def _stage(pipeline: PlannedPipeline, stage: int) -> StagePlan:
    own = [number for number, at in enumerate(pipeline.schedule.stage_of) if at == stage]
    chunks = [pipeline.planned[number] for number in own]
    in_flight = pipeline.simulation.in_flight[stage]
    state = sum(_bytes(chunk, pipeline.mesh, (Holds.LEAF, Holds.SUM)) for chunk in chunks)
    kept = max(_bytes(chunk, pipeline.mesh, (Holds.KEPT, Holds.ENTERING)) for chunk in chunks)
    peak = max(task.planned.plan.cost.memory_bytes for chunk in chunks for task in chunk.tasks.values())
    others = state - min(_bytes(chunk, pipeline.mesh, (Holds.LEAF, Holds.SUM)) for chunk in chunks)
    back = [sum(chunk.costs.of(kind) for kind in chunk.tasks if kind is not Kind.FORWARD) for chunk in chunks]
    return StagePlan(
        chunks=tuple(own),
        tasks={
            f"{kind.name.lower()}{number}": task.planned.plan for number in own for kind, task in pipeline.planned[number].tasks.items()
        },
        num_equations=sum(len(pipeline.chunks[number].program.jaxpr.eqns) for number in own),
        num_parameters=sum(len(chunk.passes.weights) for chunk in chunks),
        forward_s=sum(chunk.costs.forward for chunk in chunks),
        backward_s=sum(back),
        in_flight=in_flight,
        state_bytes=state,
        kept_bytes=in_flight * kept,
        memory_bytes=peak + others + max(0, in_flight - 1) * kept,
    )


def _bytes(chunk: PlannedChunk, mesh: LogicalMesh, holds: tuple[Holds, ...]) -> int:
    """Returns the bytes on one device of some of a chunk's arrays."""
    found: dict[Slot, int] = {}
    for task in chunk.tasks.values():
        avals, shardings = task.program.avals, task.shardings
        for slot, aval in avals.items():
            if slot.holds in holds:
                ways = math.prod(mesh.num_slices(names) for names in shardings[slot])
                found[slot] = math.prod(aval.shape) * int(aval.dtype.itemsize) // ways
    return sum(found.values())


def _transfers(pipeline: PlannedPipeline) -> list[Transfer]:
    """Returns what the schedule moves between chunks: what leaves each, and the cotangents that come back."""
    found, micro = [], pipeline.schedule.num_micro
    for number, chunk in enumerate(pipeline.planned):
        for holds, step in ((Holds.LEAVING, 1), (Holds.OF_ENTERING, -1)):
            avals = {slot: aval for task in chunk.tasks.values() for slot, aval in task.program.avals.items() if slot.holds is holds}
            if avals and 0 <= number + step < len(pipeline.planned):
                sizes = sum(math.prod(aval.shape) * int(aval.dtype.itemsize) for aval in avals.values())
                found.append(Transfer(number, number + step, micro * len(avals), micro * sizes))
    return found
