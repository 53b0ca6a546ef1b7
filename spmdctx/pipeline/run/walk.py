"""Walks a schedule: runs each task on the devices of its stage, and moves what the next one reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.programs.transfers import Route
from spmdctx.pipeline.run.compiled import CompiledChunk
from spmdctx.pipeline.schedule.tasks import Kind, Schedule, Task

_LAST = frozenset({Kind.BACKWARD, Kind.WEIGHT})
"""Kinds after which a chunk is done with a micro-batch."""


@dataclass
class Counts:
    """What a run has done.

    Attributes:
        runs: of each kind of task of each chunk.
        moves: arrays moved over each pair of chunks.
        bytes: their bytes.
        in_flight: the most micro-batches in flight in each chunk.
        in_flight_on: the most on each stage, over all its chunks.
        around: the number of arrays moved for the loss as a whole and after it, and their bytes, by route.
        after: runs of each program after the loss, by its name.
    """

    runs: Counter[tuple[Kind, int]] = field(default_factory=Counter)
    moves: Counter[tuple[int, int]] = field(default_factory=Counter)
    bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    in_flight: Counter[int] = field(default_factory=Counter)
    in_flight_on: Counter[int] = field(default_factory=Counter)
    around: dict[Route, tuple[int, int]] = field(default_factory=dict)
    after: Counter[str] = field(default_factory=Counter)

    def add(self, route: Route, num_bytes: int) -> None:
        """Counts an array that is moved beside the micro-batches."""
        count, total = self.around.get(route, (0, 0))
        self.around[route] = (count + 1, total + num_bytes)


@dataclass
class Held:
    """The arrays of a chunk: those of the whole step, and those of each micro-batch."""

    step: dict[Slot, Any] = field(default_factory=dict)
    micro: dict[int, dict[Slot, Any]] = field(default_factory=dict)
    results: dict[int, dict[int, Any]] = field(default_factory=dict)

    def of(self, slot: Slot, micro: int) -> Any:
        """Returns an array; what a micro-batch has of its own comes first."""
        own = self.micro.get(micro, {})
        return own[slot] if slot in own else self.step[slot]


class Walk:
    """Runs the tasks of a schedule in an order in which each comes after those that it needs.

    Args:
        chunks: the compiled chunks.
        schedule: their schedule.
        order: all tasks.
        carried: for each leaf that a micro-batch takes from the one before, by chunk, the result that is its next value.
        move: moves arrays to shardings on the devices of another stage.
    """

    def __init__(
        self,
        chunks: Sequence[CompiledChunk],
        schedule: Schedule,
        order: Sequence[Task],
        carried: Sequence[Mapping[int, int]],
        move: Callable[[Any, Any], Any] = jax.device_put,
    ) -> None:
        self._chunks, self._schedule, self._order, self._carried, self._move = chunks, schedule, order, carried, move
        self.counts = Counts()

    def run(self, held: Sequence[Held], counts: Counts | None = None) -> None:
        """Runs all tasks; `held` has the leaves, the sums and the parts of the batch, and takes sums and results.

        `counts` takes what is done, beside what it has already.
        """
        counts = self.counts = Counts() if counts is None else counts
        alive: Counter[int] = Counter()
        alive_on: Counter[int] = Counter()
        for task in self._order:
            own, stage = held[task.chunk], self._schedule.stage_of[task.chunk]
            self._run(task, own)
            counts.runs[task.kind, task.chunk] += 1
            if task.kind is Kind.FORWARD:
                alive[task.chunk] += 1
                alive_on[stage] += 1
                counts.in_flight[task.chunk] = max(counts.in_flight[task.chunk], alive[task.chunk])
                counts.in_flight_on[stage] = max(counts.in_flight_on[stage], alive_on[stage])
                self._hand_on(task, held, 1, Holds.LEAVING, Holds.ENTERING)
            elif task.kind is not Kind.WEIGHT:
                self._hand_on(task, held, -1, Holds.OF_ENTERING, Holds.OF_LEAVING)
            if task.kind in _LAST:
                alive[task.chunk] -= 1
                alive_on[stage] -= 1
                del own.micro[task.micro]

    def _run(self, task: Task, own: Held) -> None:
        program, micro = self._chunks[task.chunk].tasks[task.kind], task.micro
        arrays = own.micro.setdefault(micro, {})
        if task.kind is Kind.FORWARD:
            # The backward pass reads state as it was, and not as later micro-batches leave it.
            arrays.update({slot: own.step[slot] for leaf in self._carried[task.chunk] if (slot := Slot(Holds.LEAF, leaf)) in own.step})
        made = program.run(*(own.of(slot, micro) for slot in program.inputs))
        for slot, value in zip(program.outputs, made, strict=True):
            if slot.holds is Holds.SUM:
                own.step[slot] = value
            elif slot.holds is Holds.RESULT:
                own.results.setdefault(slot.number, {})[micro] = value
            else:
                arrays[slot] = value
        if task.kind is Kind.FORWARD:
            for leaf, result in self._carried[task.chunk].items():
                own.step[Slot(Holds.LEAF, leaf)] = own.results[result][micro]

    def _hand_on(self, task: Task, held: Sequence[Held], step: int, source: Holds, target: Holds) -> None:
        """Moves what a task has made for the chunk after or before it."""
        reader = task.chunk + step
        arrays = held[task.chunk].micro[task.micro]
        leaving = [slot for slot in arrays if slot.holds is source]
        if not leaving or not 0 <= reader < len(self._chunks):
            return
        values = [arrays.pop(slot) for slot in leaving]
        targets = [Slot(target, slot.number) for slot in leaving]
        moved = self._move(values, [self._chunks[reader].shardings[slot] for slot in targets])
        held[reader].micro.setdefault(task.micro, {}).update(zip(targets, moved, strict=True))
        self.counts.moves[task.chunk, reader] += len(values)
        self.counts.bytes[task.chunk, reader] += sum(value.nbytes for value in values)
