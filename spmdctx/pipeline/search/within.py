"""Plans the stages of a pipeline again where they do not fit a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmdctx.errors import InfeasibleError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.pipeline.search.reduced import Chosen, best_completed
from spmdctx.pipeline.stages.memory import StageMemory, memory_of
from spmdctx.pipeline.stages.plans import PlannedChunk
from spmdctx.pipeline.stages.staging import Stages, Staging
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.wording import bytes_text

_MOST_ROOMS = 5
"""How often a pipeline is planned within a budget, with more or less room for the programs of its stages."""

_OTHER_ROOMS = 2
"""The same on the mesh that suits the room best."""

_SPACING = 0.01
"""Share of the budget by which a room that is too small and one that is too large must differ to look for one between them."""


def within(own: Chosen, budget: int) -> Chosen:
    """Returns the same stages within a budget, if need be planned again, each program with what the stage leaves for it.

    Another plan leaves its stage another room: so several rooms are tried. They keep the mesh. Once a room is too small on it, other meshes
    are tried, and larger rooms on the same mesh only where nothing fits on those.

    Raises:
        InfeasibleError: a stage needs more.
    """
    memories = memory_of(own.found)
    if max(one.peak_bytes for one in memories) <= budget:
        return own
    same, other = (_Rooms(own, memories, budget, mesh, most) for mesh, most in ((own.found.mesh, _MOST_ROOMS), (None, _OTHER_ROOMS)))
    found = same.planned(ends_if_refused=True) or other.planned() or same.planned()
    if found is None:
        raise over(own.found, budget) from same.cause or other.cause
    return found


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
                staging, stages = self._staged()
            except InfeasibleError as error:
                self.cause = error
                self._raise()
                if ends_if_refused:
                    return None
                continue
            self.cause = None
            tried = Chosen(staging, stages, best_completed(staging, stages, self._budget))
            memories = memory_of(tried.found)
            if max(one.peak_bytes for one in memories) <= self._budget:
                return tried
            self._lower(tried, memories)
        return None

    def _is_worth_it(self) -> bool:
        low, high = self._low, self._high
        return self._left > 0 and low < self._room < high and not (low and high - low <= _SPACING * self._budget)

    def _staged(self) -> tuple[Staging, Stages]:
        own = self._own
        staging = Staging(own.staging.loss, replace(own.staging.given, memory_bytes=self._room), *own.staging.parts)
        staging.settings = replace(staging.settings, mesh=self._mesh)
        stages = staging.plan(own.stages.places)
        staging.settings = replace(staging.settings, memory_bytes=None)
        return staging, stages

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
