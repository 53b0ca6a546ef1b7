"""Zero-bubble schedules (Qi et al. 2024): gradients of weights, which nothing waits for, fill the time in which stages would wait."""

from __future__ import annotations

from collections.abc import Sequence

from spmdctx.pipeline.schedule.tasks import CostOf, Kind, Schedule, Task, needs

_URGENT_FIRST = (Kind.INPUT, Kind.FORWARD, Kind.WEIGHT)
"""Kinds of task in the order of their urgency."""

_ADDED = {Kind.FORWARD: 1, Kind.INPUT: 0, Kind.WEIGHT: -1}
"""How a task changes the number of micro-batches in flight."""


def zero_bubble_h1(num_stages: int, num_micro: int) -> Schedule:
    """Runs 1F1B with the backward pass in two parts; every stage has at most as many micro-batches in flight as 1F1B's first.

    Stage s runs the gradient of weights s input gradients late, so that all stages end together. With equal tasks each stage waits for
    (p - 1) (F + I - W) seconds.
    """
    stages = []
    for stage in range(num_stages):
        forward = weight = 0
        tasks: list[Task] = []
        while forward < min(num_stages - stage, num_micro):
            tasks.append(Task(Kind.FORWARD, stage, forward))
            forward += 1
        for micro in range(num_micro):
            tasks.append(Task(Kind.INPUT, stage, micro))
            if micro >= stage:
                tasks.append(Task(Kind.WEIGHT, stage, weight))
                weight += 1
            if forward < num_micro:
                tasks.append(Task(Kind.FORWARD, stage, forward))
                forward += 1
        tasks += [Task(Kind.WEIGHT, stage, micro) for micro in range(weight, num_micro)]
        stages.append(tuple(tasks))
    return Schedule("zero_bubble_h1", tuple(stages), tuple(range(num_stages)), num_micro)


def zero_bubble_v(num_stages: int, num_micro: int, cost: CostOf) -> Schedule:
    """Runs two chunks on each stage, chunk c on stages c and 2p - 1 - c, so that the first stage has the last chunk too.

    At most 2p chunks are in flight on a stage, which is p micro-batches of its whole share. The tasks are listed as they become ready,
    input gradients first, so the order depends on their seconds.
    """
    count = 2 * num_stages
    stage_of = tuple(min(chunk, count - 1 - chunk) for chunk in range(count))
    return Schedule("zero_bubble_v", _Lists(stage_of, num_micro, count, cost).run(), stage_of, num_micro)


class _Lists:
    """Lists what is ready first: input gradients, then forward passes, then gradients of weights."""

    def __init__(self, stage_of: Sequence[int], num_micro: int, most_in_flight: int, cost: CostOf) -> None:
        self._stage_of, self._num_micro, self._most, self._cost = stage_of, num_micro, most_in_flight, cost
        num_stages = max(stage_of) + 1
        self._own = [[chunk for chunk, stage in enumerate(stage_of) if stage == own] for own in range(num_stages)]
        self._free, self._in_flight = [0.0] * num_stages, [0] * len(stage_of)
        self._tasks: list[list[Task]] = [[] for _ in range(num_stages)]
        self._next = {(kind, chunk): 0 for kind in _URGENT_FIRST for chunk in range(len(stage_of))}
        self._ends: dict[Task, float] = {}

    def run(self) -> tuple[tuple[Task, ...], ...]:
        for _ in range(len(self._next) * self._num_micro):
            (start, *_), stage, task = min(found for stage in range(len(self._own)) for found in self._choices(stage))
            self._ends[task] = self._free[stage] = start + self._cost(task)
            self._in_flight[task.chunk] += _ADDED[task.kind]
            self._next[task.kind, task.chunk] += 1
            self._tasks[stage].append(task)
        return tuple(map(tuple, self._tasks))

    def _choices(self, stage: int) -> list[tuple[tuple[float, int, int, int], int, Task]]:
        """Returns the tasks that a stage could run next, each with its start and its urgency."""
        found = []
        for chunk in self._own[stage]:
            for urgency, kind in enumerate(_URGENT_FIRST):
                task = Task(kind, chunk, self._next[kind, chunk])
                full = kind is Kind.FORWARD and self._is_full(stage, chunk)
                wanted = needs(task, len(self._stage_of), splits_backward=True)
                if task.micro >= self._num_micro or full or not all(one in self._ends for one in wanted):
                    continue
                start = max([self._free[stage], *(self._ends[one] for one in wanted)])
                found.append(((start, urgency, chunk if kind is not Kind.FORWARD else -chunk, task.micro), stage, task))
        return found

    def _is_full(self, stage: int, chunk: int) -> bool:
        """Returns whether a stage may hold no further micro-batch of a chunk.

        The last place is kept for the second chunk while that has none: otherwise the oldest micro-batch could wait forever.
        """
        first, *others = (self._in_flight[one] for one in self._own[stage])
        keeps = chunk == self._own[stage][0] and not any(others)
        return first + sum(others) >= self._most - keeps
