"""The tasks of a pipeline: what each computes, where it runs, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Kind(StrEnum):
    """What a task computes of one chunk and one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of inputs and weights together."""
    INPUT = "I"
    """The gradient of the chunk's input, where the backward pass is in two parts."""
    WEIGHT = "W"
    """The gradients of its weights, which nothing else waits for."""


class Task(NamedTuple):
    """One task: a kind, a chunk of the model and a micro-batch. Chunks are in the order of the forward pass."""

    kind: Kind
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro}"


class Costs(NamedTuple):
    """The seconds of a chunk's tasks. A backward pass in two parts may take longer than one in a whole."""

    forward: float
    backward: float
    input: float
    weight: float

    def of(self, kind: Kind) -> float:
        """Returns the seconds of one kind of task."""
        return {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.INPUT: self.input, Kind.WEIGHT: self.weight}[kind]


@dataclass(frozen=True)
class Schedule:
    """The tasks of each stage, in the order in which its devices run them.

    Attributes:
        name: as `pipeline_scheduler` of the context gives it, or how messages call it.
        stages: the tasks of each stage.
        stage_of: the stage on whose devices each chunk runs.
        num_micro: micro-batches.
    """

    name: str
    stages: tuple[tuple[Task, ...], ...]
    stage_of: tuple[int, ...]
    num_micro: int

    @property
    def num_stages(self) -> int:
        """Groups of devices."""
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Parts of the model; interleaved schedules have several on each stage."""
        return len(self.stage_of)

    @cached_property
    def splits_backward(self) -> bool:
        """True if the gradients of weights are tasks of their own."""
        return any(task.kind is Kind.WEIGHT for tasks in self.stages for task in tasks)

    def needs(self, task: Task) -> list[Task]:
        """Returns the tasks whose results a task reads."""
        return needs(task, self.num_chunks, splits_backward=self.splits_backward)


def needs(task: Task, num_chunks: int, *, splits_backward: bool) -> list[Task]:
    """Returns the tasks whose results a task reads, in a pipeline of so many chunks."""
    kind, chunk, micro = task
    if kind is Kind.FORWARD:
        return [Task(kind, chunk - 1, micro)] if chunk else []
    if kind is Kind.WEIGHT:
        return [Task(Kind.INPUT, chunk, micro)]
    back = Kind.INPUT if splits_backward else Kind.BACKWARD
    after = [Task(back, chunk + 1, micro)] if chunk + 1 < num_chunks else []
    return [Task(Kind.FORWARD, chunk, micro), *after]


def most_in_flight(tasks: Sequence[Task]) -> int:
    """Returns the most micro-batches of single chunks whose forward pass has run, and whose last backward task has not."""
    change: dict[Kind, int] = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1, Kind.INPUT: 0}
    count = most = 0
    for task in tasks:
        count += change[task.kind]
        most = max(most, count)
    return most


CostOf = Callable[[Task], float]
"""Gives the seconds of a task."""


def cost_of(costs: Sequence[Costs]) -> CostOf:
    """Returns the function that gives a task's seconds, from those of each chunk."""
    return lambda task: costs[task.chunk].of(task.kind)
