"""Simulates a schedule: when each task runs, how long devices wait, and what is in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from spmdctx.errors import StrategyError
from spmdctx.pipeline.schedule.tasks import CostOf, Schedule, Task, most_in_flight


class Span(NamedTuple):
    """When a task runs, in seconds from the start of the step's pipeline."""

    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule with the times of its tasks."""

    schedule: Schedule
    spans: dict[Task, Span]

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first task's start to the last one's end."""
        return max((span.end for span in self.spans.values()), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """The seconds in which each stage computes."""
        return tuple(sum(self.spans[task].end - self.spans[task].start for task in tasks) for tasks in self.schedule.stages)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which stages wait, in their mean."""
        total = self.makespan_s * self.schedule.num_stages
        return 1 - sum(self.busy_s) / total if total else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches of single chunks that each stage holds between their forward and their last backward task."""
        return tuple(most_in_flight(tasks) for tasks in self.schedule.stages)

    @cached_property
    def order(self) -> tuple[Task, ...]:
        """All tasks by the end of their time, then by stage: an order in which every task comes after those that it needs."""
        stage_of = self.schedule.stage_of
        return tuple(sorted(self.spans, key=lambda task: (self.spans[task].end, stage_of[task.chunk], self.spans[task].start)))


def no_hop(_chunk: int, _reader: int) -> float:
    """Prices moves between stages at nothing."""
    return 0.0


def simulate(schedule: Schedule, cost: CostOf, hop_s: Callable[[int, int], float] = no_hop) -> Simulation:
    """Runs a schedule with the given times.

    Args:
        schedule: what to run.
        cost: seconds of a task.
        hop_s: seconds from one chunk's end to the start of a chunk on another stage that reads its result.

    Raises:
        StrategyError: the tasks wait for each other without end.
    """
    spans: dict[Task, Span] = {}
    free = [0.0] * schedule.num_stages
    places = [0] * schedule.num_stages
    left = sum(map(len, schedule.stages))
    while left:
        before = left
        for stage, tasks in enumerate(schedule.stages):
            while places[stage] < len(tasks):
                task = tasks[places[stage]]
                ready = _ready(schedule, task, spans, hop_s)
                if ready is None:
                    break
                start = max(free[stage], ready)
                free[stage] = start + cost(task)
                spans[task] = Span(start, free[stage])
                places[stage] += 1
                left -= 1
        if left == before:
            stuck = [str(tasks[place]) for tasks, place in zip(schedule.stages, places, strict=True) if place < len(tasks)]
            raise StrategyError("The tasks of a pipeline wait for each other.", got=", ".join(stuck))
    return Simulation(schedule, spans)


def _ready(schedule: Schedule, task: Task, spans: dict[Task, Span], hop_s: Callable[[int, int], float]) -> float | None:
    """Returns when all that a task needs is on its devices, or None if some of it has no time yet."""
    ready, own = 0.0, schedule.stage_of[task.chunk]
    for needed in schedule.needs(task):
        span = spans.get(needed)
        if span is None:
            return None
        away = schedule.stage_of[needed.chunk] != own
        ready = max(ready, span.end + (hop_s(needed.chunk, task.chunk) if away else 0.0))
    return ready
