"""A straight line of programs and moves over numbered registers, which is written once and run at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax

from spmdctx.pipeline.programs.transfers import Route
from spmdctx.pipeline.schedule.tasks import Kind

_UNREAD = 0
"""The register of results that nothing reads."""


@dataclass
class Counts:
    """What a step has done. Of several processes, each counts what it sends, and what its own chunks hold.

    Attributes:
        runs: of each kind of task of each chunk.
        moves: arrays handed from one chunk to another.
        bytes: their bytes.
        in_flight: the most micro-batches in flight in each chunk.
        in_flight_of_stage: the most on each stage, over all its chunks.
        around: the number of arrays moved for the loss as a whole and after it, and their bytes, by route.
        after: runs of each program after the loss, by its name.
    """

    runs: Counter[tuple[Kind, int]] = field(default_factory=Counter)
    moves: Counter[tuple[int, int]] = field(default_factory=Counter)
    bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    in_flight: Counter[int] = field(default_factory=Counter)
    in_flight_of_stage: Counter[int] = field(default_factory=Counter)
    around: dict[Route, tuple[int, int]] = field(default_factory=dict)
    after: Counter[str] = field(default_factory=Counter)
    _alive: Counter[int] = field(default_factory=Counter)
    _alive_on: Counter[int] = field(default_factory=Counter)

    def start_or_end(self, chunk: int, stage: int, change: int) -> None:
        """Counts a micro-batch that begins, or ends, to be in flight."""
        self._alive[chunk] += change
        self._alive_on[stage] += change
        self.in_flight[chunk] = max(self.in_flight[chunk], self._alive[chunk])
        self.in_flight_of_stage[stage] = max(self.in_flight_of_stage[stage], self._alive_on[stage])


class Event(Protocol):
    """What an entry of a tape does to a pipeline."""

    def count_in(self, counts: Counts) -> None:
        """Counts the entry, which has run."""


class TaskRun(NamedTuple):
    """A task of a chunk that lies on a stage; `change` is what it adds to the micro-batches in flight."""

    kind: Kind
    chunk: int
    stage: int
    change: int

    def count_in(self, counts: Counts) -> None:
        """Counts the task."""
        counts.runs[self.kind, self.chunk] += 1
        if self.change:
            counts.start_or_end(self.chunk, self.stage, self.change)


class AfterRun(NamedTuple):
    """A program after the loss."""

    name: str

    def count_in(self, counts: Counts) -> None:
        """Counts the program."""
        counts.after[self.name] += 1


class HandedOn(NamedTuple):
    """Arrays that go from one chunk to another."""

    source: int
    target: int
    num_arrays: int
    bytes: int

    def count_in(self, counts: Counts) -> None:
        """Counts the arrays."""
        counts.moves[self.source, self.target] += self.num_arrays
        counts.bytes[self.source, self.target] += self.bytes


class Crossing(NamedTuple):
    """An array that goes from one stage to another beside the micro-batches."""

    route: Route
    bytes: int

    def count_in(self, counts: Counts) -> None:
        """Counts the array."""
        count, total = counts.around.get(self.route, (0, 0))
        counts.around[self.route] = (count + 1, total + self.bytes)


class _Entry(NamedTuple):
    """A function with the registers that it reads and writes, and those that nothing reads any more."""

    run: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    event: Event | None


class Tape:
    """Entries in the order in which they run. Values have names, of which each is written once.

    Args:
        waits: whether each entry waits for what it makes, so that no two run at once in a process.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self._registers: dict[Hashable, int] = {}
        self._made: list[tuple[Callable[..., Sequence[Any]], tuple[Hashable, ...], tuple[Hashable, ...], Event | None]] = []
        self._constants: list[tuple[Hashable, Callable[[], Any]]] = []

    def run(
        self, fn: Callable[..., Sequence[Any]], inputs: Iterable[Hashable], outputs: Iterable[Hashable], event: Event | None = None
    ) -> None:
        """Appends a function of arrays, which gives a sequence of arrays."""
        self._made.append((_waiting(fn) if self._waits else fn, tuple(inputs), tuple(outputs), event))

    def constant(self, name: Hashable, make: Callable[[], Any]) -> None:
        """Notes a value that is the same in all steps; it is made before the first one."""
        self._constants.append((name, make))

    def finished(self, inputs: Sequence[Hashable], results: Sequence[Hashable]) -> Program:
        """Returns the program that takes some values and gives others."""
        read = {name for _, names, _, _ in self._made for name in names}.union(results)
        number = {name: place for place, name in enumerate(dict.fromkeys((*inputs, *(name for name, _ in self._constants))), 1)}
        for _, _, outputs, _ in self._made:
            for name in outputs:
                number.setdefault(name, len(number) + 1 if name in read else _UNREAD)
        last = {name: place for place, (_, names, _, _) in enumerate(self._made) for name in names}
        stay = {*results, *(name for name, _ in self._constants)}
        dying: dict[int, list[int]] = {}
        for name, place in last.items():
            if name not in stay:
                dying.setdefault(place, []).append(number[name])
        entries = [
            _Entry(fn, tuple(number[one] for one in names), tuple(number[one] for one in outputs), tuple(dying.get(place, ())), event)
            for place, (fn, names, outputs, event) in enumerate(self._made)
        ]
        size = max(number.values(), default=0) + 1
        return Program(entries, [number[name] for name in inputs], [number[name] for name in results], (size, self._constants, number))


def _waiting(fn: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    def run(*arrays: Any) -> Sequence[Any]:
        made: Sequence[Any] = jax.block_until_ready(fn(*arrays))
        return made

    return run


class Program:
    """A finished tape. `counts` are those of the last run, None before the first."""

    def __init__(
        self,
        entries: Sequence[_Entry],
        inputs: Sequence[int],
        results: Sequence[int],
        store: tuple[int, Sequence[tuple[Hashable, Callable[[], Any]]], dict[Hashable, int]],
    ) -> None:
        self._entries, self._inputs, self._results = entries, inputs, results
        self._size, self._constants, self._number = store
        self._kept: list[tuple[int, Any]] | None = None
        self.counts: Counts | None = None

    def dry_counts(self) -> Counts:
        """Returns what a run would count, without running."""
        counts = Counts()
        for entry in self._entries:
            if entry.event is not None:
                entry.event.count_in(counts)
        return counts

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Runs all entries; an array that no later entry reads is let go at once."""
        if self._kept is None:
            self._kept = [(self._number[name], make()) for name, make in self._constants]
        registers: list[Any] = [None] * self._size
        for place, value in self._kept:
            registers[place] = value
        for place, value in zip(self._inputs, values, strict=True):
            registers[place] = value
        counts = self.counts = Counts()
        for run, inputs, outputs, dead, event in self._entries:
            made = run(*[registers[place] for place in inputs])
            for place in dead:
                registers[place] = None
            for place, value in zip(outputs, made, strict=True):
                registers[place] = value
            if event is not None:
                event.count_in(counts)
        return [registers[place] for place in self._results]
