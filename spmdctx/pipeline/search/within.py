"""Plans the stages of a pipeline again where they do not fit a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmdctx.errors import InfeasibleError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.pipeline.search.reduced import Chosen, best_completed
from spmdctx.pipeline.stages.memory import StageMemory, memory_of
from spmdctx.pipeline.stages.plans import PlannedChunk
from spmdctx.pipeline.stages.staging import Staging
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.wording import bytes_text

_MOST_ROOMS = 5
"""How often a pipeline is planned within a budget, with more or less room for the programs of its stages."""

_OTHER_ROOMS = 2
"""The same on other meshes than that of the fastest plan."""

_SPACING = 0.01
"""Share of the budget by which a room that is too small and one that is too large must differ to look for one between them."""


def within(own: Chosen, budget: int) -> Chosen:
    """Returns the same stages within a budget, if need be planned again, each program with what the stage leaves for it.

    Another plan leaves its stage another room: so several rooms are tried. They keep the mesh; others are tried if nothing fits on it.

    Raises:
        InfeasibleError: a stage needs more.
    """
    memories = memory_of(own.found)
    if max(one.peak_bytes for one in memories) <= budget:
        return own
    cause: InfeasibleError | None = None
    for mesh, most in ((own.found.mesh, _MOST_ROOMS), (None, _OTHER_ROOMS)):
        try:
            return _on(mesh, most, own, memories, budget)
        except InfeasibleError as error:
            cause = error
    raise over(own.found, budget) from cause


def _on(mesh: LogicalMesh | None, most: int, own: Chosen, memories: Sequence[StageMemory], budget: int) -> Chosen:
    """Returns the stages within a budget, on a mesh if one is given.

    Raises:
        InfeasibleError: none of `most` rooms leads to stages that fit.
    """
    plans = [task.planned.plan for chunk in own.stages.planned for task in chunk.tasks.values()]
    low, high, room = 0, max(plan.safe_memory_bytes for plan in plans), _room(own, memories, budget)
    cause: InfeasibleError | None = None
    for _ in range(most):
        if not low < room < high or (low and high - low <= _SPACING * budget):
            break
        staging = Staging(own.staging.loss, replace(own.staging.given, memory_bytes=room), *own.staging.parts)
        staging.settings = replace(staging.settings, mesh=mesh)
        try:
            stages = staging.plan(own.stages.places)
        except InfeasibleError as error:
            cause, low, room = error, room, (room + high) // 2
            continue
        staging.settings = replace(staging.settings, memory_bytes=None)
        found = best_completed(staging, stages, budget)
        tried, taken = Chosen(staging, stages, found), memory_of(found)
        if max(one.peak_bytes for one in taken) <= budget:
            return tried
        # A search may exceed its room by what it does not count, and will again.
        exceeded = max(0, max(map(_size, stages.planned)) - room)
        high, room = room, max(min(_room(tried, taken, budget) - exceeded, room - 1), (low + room) // 2)
    raise cause or over(own.found, budget)


def _room(own: Chosen, memories: Sequence[StageMemory], budget: int) -> int:
    """Returns what stages leave for the programs of their chunks.

    What lies beside a program while it runs is taken to stay. What runs after the loss takes as much less as the chunks do.
    """
    rooms = [budget]
    for number, chunk in enumerate(own.stages.planned):
        memory = memories[own.stages.schedule.stage_of[number]]
        size = _size(chunk)
        of_chunk = max(memory.peaks[task.name] for task in chunk.tasks.values())
        if of_chunk > budget:
            rooms.append(budget - of_chunk + size)
        if memory.peak_bytes > budget:
            rooms.append(size * budget // memory.peak_bytes)
    return min(rooms)


def _size(chunk: PlannedChunk) -> int:
    """Returns the bytes of a chunk's largest program."""
    sizes: list[int] = [task.planned.plan.cost.memory_bytes for task in chunk.tasks.values()]
    return max(sizes)


def over(found: PlannedPipeline, budget: int) -> InfeasibleError:
    """Returns the error for the fullest stage."""
    memories = memory_of(found)
    stage = max(range(len(memories)), key=lambda own: memories[own].peak_bytes)
    own = memories[stage]
    return InfeasibleError(
        f"Stage {stage} of {len(memories)} needs {bytes_text(own.peak_bytes)} per device, more than memory_bytes={budget}.",
        where=found.step.loss.where,
        got=(
            f"{bytes_text(own.state_bytes)} of state and sums of gradients, {bytes_text(own.kept_bytes)} kept by "
            f"{found.simulation.in_flight[stage]} micro-batches in flight"
        ),
        fix="use more stages or devices, checkpoint layers, or more micro-batches of fewer rows",
    )
