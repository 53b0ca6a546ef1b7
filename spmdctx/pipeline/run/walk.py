"""Writes a schedule on a tape: each task on the devices of its stage, and the moves of what the next one reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.run.compiled import CompiledChunk
from spmdctx.pipeline.run.routes import Spot, move
from spmdctx.pipeline.run.tape import HandedOn, Tape, TaskRun
from spmdctx.pipeline.schedule.tasks import Kind, Task

_LAST = frozenset({Kind.BACKWARD, Kind.WEIGHT})
"""Kinds after which a chunk is done with a micro-batch."""


@dataclass
class Held:
    """Where the arrays of a chunk are: those of the whole step, those of each micro-batch, and results by number and micro-batch."""

    step: dict[Slot, Spot] = field(default_factory=dict)
    micro: dict[int, dict[Slot, Spot]] = field(default_factory=dict)
    results: dict[int, dict[int, Spot]] = field(default_factory=dict)

    def of(self, slot: Slot, micro: int) -> Spot:
        """Returns an array; what a micro-batch has of its own comes first."""
        own = self.micro.get(micro, {})
        return own[slot] if slot in own else self.step[slot]


class Walk:
    """Writes the tasks of a schedule, in an order in which each comes after those that it needs.

    Args:
        tape: where to write.
        chunks: the compiled chunks.
        stage_of: the stage of each chunk.
        carried: for each leaf that a micro-batch takes from the one before, by chunk, the result that is its next value.
    """

    def __init__(self, tape: Tape, chunks: Sequence[CompiledChunk], stage_of: Sequence[int], carried: Sequence[Mapping[int, int]]) -> None:
        self._tape, self._chunks, self._stage_of, self._carried = tape, chunks, stage_of, carried
        self._avals: list[dict[Slot, Any]] = []
        for chunk in chunks:
            found: dict[Slot, Any] = {}
            for task in chunk.planned.tasks.values():
                found.update(task.program.avals)
            self._avals.append(found)

    def write(self, order: Sequence[Task], held: Sequence[Held]) -> None:
        """Writes all tasks; `held` has the leaves, the sums and the parts of the batch, and takes sums and results."""
        for task in order:
            own = held[task.chunk]
            self._run(task, own)
            if task.kind is Kind.FORWARD:
                self._hand_on(task, held, 1, Holds.LEAVING, Holds.ENTERING)
            elif task.kind is not Kind.WEIGHT:
                self._hand_on(task, held, -1, Holds.OF_ENTERING, Holds.OF_LEAVING)
            if task.kind in _LAST:
                del own.micro[task.micro]

    def _run(self, task: Task, own: Held) -> None:
        chunk, micro = self._chunks[task.chunk], task.micro
        program = chunk.tasks[task.kind]
        arrays = own.micro.setdefault(micro, {})
        if task.kind is Kind.FORWARD:
            # The backward pass reads state as it was, and not as later micro-batches leave it.
            arrays.update({slot: own.step[slot] for leaf in self._carried[task.chunk] if (slot := Slot(Holds.LEAF, leaf)) in own.step})
        made = [Spot((task, slot), chunk.shardings[slot], self._avals[task.chunk][slot]) for slot in program.outputs]
        if program.jitted.run is not None:
            change = 1 if task.kind is Kind.FORWARD else -1 if task.kind in _LAST else 0
            event = TaskRun(task.kind, task.chunk, self._stage_of[task.chunk], change)
            inputs = [own.of(slot, micro).name for slot in program.inputs]
            self._tape.run(program.jitted.run, inputs, [spot.name for spot in made], event)
        for slot, spot in zip(program.outputs, made, strict=True):
            if slot.holds is Holds.SUM:
                own.step[slot] = spot
            elif slot.holds is Holds.RESULT:
                own.results.setdefault(slot.number, {})[micro] = spot
            else:
                arrays[slot] = spot
        if task.kind is Kind.FORWARD:
            for leaf, result in self._carried[task.chunk].items():
                own.step[Slot(Holds.LEAF, leaf)] = own.results[result][micro]

    def _hand_on(self, task: Task, held: Sequence[Held], step: int, source: Holds, target: Holds) -> None:
        """Writes the move of what a task has made for the chunk after or before it."""
        reader = task.chunk + step
        arrays = held[task.chunk].micro[task.micro]
        leaving = [slot for slot in arrays if slot.holds is source]
        if not leaving or not 0 <= reader < len(self._chunks):
            return
        spots = [arrays.pop(slot) for slot in leaving]
        targets = [Slot(target, slot.number) for slot in leaving]
        size = sum(math.prod(spot.aval.shape) * int(spot.aval.dtype.itemsize) for spot in spots)
        places = [self._chunks[reader].shardings[slot] for slot in targets]
        moved = move(self._tape, spots, places, HandedOn(task.chunk, reader, len(spots), size))
        held[reader].micro.setdefault(task.micro, {}).update(zip(targets, moved, strict=True))
