"""Plans the stages of a pipeline again where they do not fit a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from spmdctx.errors import InfeasibleError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.pipeline.search.reduced import Chosen, best_completed
from spmdctx.pipeline.stages.memory import StageMemory, memory_of
from spmdctx.pipeline.stages.plans import PlannedChunk
from spmdctx.pipeline.stages.staging import Stages, Staging
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.wording import bytes_text, counted

_MOST_ROOMS = 5
"""How often a pipeline is planned within a budget, with more or less room for the programs of its stages."""

_OTHER_ROOMS = 2
"""The same on the mesh that suits the room best."""

_SPACING = 0.01
"""Share of the budget by which a room that is too small and one that is too large must differ to look for one between them."""


_WORTH = 0.005
"""Share of a step by which rounds of chunks that keep to no room must promise to shorten it."""

_MIXES = 2
"""How often a pipeline is planned with some of its rounds within a room."""


def within(own: Chosen, budget: int) -> Chosen:
    """Returns the same stages within a budget, if need be planned again, each program with what the stage leaves for it.

    Another plan leaves its stage another room: so several rooms are tried. They keep the mesh. Once a room is too small on it, other meshes
    are tried, and larger rooms on the same mesh only where nothing fits on those. Of several chunks on each stage, as few as need be keep
    to the room.

    Raises:
        InfeasibleError: a stage needs more.
    """
    memories = memory_of(own.found)
    if _peak(own) <= budget:
        return own
    same, other = (_Rooms(own, memories, budget, mesh, most) for mesh, most in ((own.found.mesh, _MOST_ROOMS), (None, _OTHER_ROOMS)))
    found = same.planned(ends_if_refused=True) or other.planned() or same.planned()
    if found is None:
        raise over(own.found, budget) from same.cause or other.cause
    return _with_rounds_mixed(own, found, budget)


def _with_rounds_mixed(own: Chosen, within_room: Chosen, budget: int) -> Chosen:
    """Returns a plan of which only the first rounds of chunks keep to the room, if it fits and is faster than that of which all do.

    A room that is a little too small for a plan may lead to one that is much smaller, and slower. `own` has the same stages without a room.
    """
    schedule, room = own.stages.schedule, within_room.staging.given.memory_bytes
    rounds, save_s = schedule.num_chunks // schedule.num_stages, within_room.found.total_s - own.found.total_s
    if rounds == 1 or room is None or save_s < _WORTH * own.found.total_s or own.found.mesh != within_room.found.mesh:
        return within_room
    large, small = _peak(own), _peak(within_room)
    fewest = max(1, math.ceil(rounds * (large - budget) / max(large - small, 1)))
    for count in range(fewest, min(fewest + _MIXES, rounds)):
        staging, stages = _staged(own, room, own.found.mesh, count * schedule.num_stages)
        tried = Chosen(staging, stages, best_completed(staging, stages, budget))
        if _peak(tried) <= budget:
            less = f"The chunks of {counted(count, 'round')} of {rounds} take less memory and more time than the others"
            tried.found.notes.append(f"{less}, so that stages fit.")
            return min(within_room, tried, key=lambda one: one.found.total_s)
    return within_room


def _staged(own: Chosen, room: int, mesh: LogicalMesh | None, num_limited: int | None = None) -> tuple[Staging, Stages]:
    """Plans the same stages again, of which all chunks, or so many, keep to a room."""
    staging = Staging(own.staging.loss, replace(own.staging.given, memory_bytes=room), *own.staging.parts)
    staging.settings, staging.num_limited = replace(staging.settings, mesh=mesh), num_limited
    stages = staging.plan(own.stages.places)
    staging.settings = replace(staging.settings, memory_bytes=None)
    return staging, stages


def _peak(own: Chosen) -> int:
    return max(one.peak_bytes for one in memory_of(own.found))


class _Rooms:
    """The rooms that are left to try for the same stages, on a mesh if one is given.

    `cause` is why there was no plan in the last room, None where there was one that does not fit.
    """

    def __init__(self, own: Chosen, memories: Sequence[StageMemory], budget: int, mesh: LogicalMesh | None, most: int) -> None:
        plans = [task.planned.plan for chunk in own.stages.planned for task in chunk.tasks.values()]
        self._own, self._budget, self._mesh, self._left = own, budget, mesh, most
        # Rooms are safe to allow for, stages likely take what they take.
        self._most = int(budget * max(plan.safe_memory_bytes / max(plan.cost.memory_bytes, 1) for plan in plans))
        self._low, self._high, self._room = 0, max(plan.safe_memory_bytes for plan in plans), _room(own, memories, budget)
        self.cause: InfeasibleError | None = None

    def planned(self, *, ends_if_refused: bool = False) -> Chosen | None:
        """Returns the stages within the budget; None if no room is left to try, or one was too small for any plan."""
        while self._is_worth_it():
            self._left -= 1
            try:
                staging, stages = _staged(self._own, self._room, self._mesh)
            except InfeasibleError as error:
                self.cause = error
                self._raise()
                if ends_if_refused:
                    return None
                continue
            self.cause = None
            tried = Chosen(staging, stages, best_completed(staging, stages, self._budget))
            if _peak(tried) <= self._budget:
                return tried
            self._lower(tried, memory_of(tried.found))
        return None

    def _is_worth_it(self) -> bool:
        low, high = self._low, self._high
        return self._left > 0 and low < self._room < high and not (low and high - low <= _SPACING * self._budget)

    def _raise(self) -> None:
        """Goes on in more room than one in which there is no plan.

        A program that takes more than the budget fits no stage. So if the largest room of use is too small as well, no other is tried.
        """
        self._low = self._room
        if self._most < self._high:
            self._room, self._high = self._most, self._most + 1
        else:
            self._room = (self._low + self._high) // 2

    def _lower(self, tried: Chosen, memories: Sequence[StageMemory]) -> None:
        """Goes on in less room than that of a plan that does not fit."""
        # A search may exceed its room by what it does not count, and will again.
        exceeded = max(0, max(map(_size, tried.stages.planned)) - self._room)
        room = max(min(_room(tried, memories, self._budget) - exceeded, self._room - 1), (self._low + self._room) // 2)
        self._high, self._room = self._room, room


def _room(own: Chosen, memories: Sequence[StageMemory], budget: int) -> int:
    """Returns what stages leave for the programs of their chunks.

    What lies beside the programs of a stage's chunks while one of them runs is taken to stay. What runs after the loss takes as much less
    as the chunks do.
    """
    rooms, stage_of = [budget], own.stages.schedule.stage_of
    for number, chunk in enumerate(own.stages.planned):
        memory = memories[stage_of[number]]
        size = _size(chunk)
        of_chunk = max(memory.peaks[task.name] for task in chunk.tasks.values())
        if of_chunk > budget:
            rooms.append(size - (of_chunk - budget) // stage_of.count(stage_of[number]))
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
