"""A straight line of programs and moves over numbered registers, which is written once and run at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_UNREAD = 0
"""The register of results that nothing reads."""


class Event(NamedTuple):
    """What an entry of a tape does to a pipeline: arrays it moves between two chunks, or what it changes in flight."""

    source: int
    target: int
    arrays: int = 0
    bytes: int = 0
    in_flight: int = 0


@dataclass
class Counts:
    """What a step has done: arrays and bytes moved over each pair of chunks, and the most micro-batches in flight in each chunk.

    Of several processes, each counts what it sends, and what its own chunks hold.
    """

    moves: Counter[tuple[int, int]] = field(default_factory=Counter)
    bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    in_flight: Counter[int] = field(default_factory=Counter)
    _alive: Counter[int] = field(default_factory=Counter)

    def add(self, event: Event) -> None:
        """Counts one entry that has run."""
        if event.arrays:
            self.moves[event.source, event.target] += event.arrays
            self.bytes[event.source, event.target] += event.bytes
        if event.in_flight:
            alive = self._alive[event.source] = self._alive[event.source] + event.in_flight
            self.in_flight[event.source] = max(self.in_flight[event.source], alive)


class _Entry(NamedTuple):
    """A function with the registers that it reads and writes, and those that nothing reads any more."""

    run: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    event: Event | None


class Tape:
    """Entries in the order in which they run. Values have names, of which each is written once."""

    def __init__(self) -> None:
        self._registers: dict[Hashable, int] = {}
        self._made: list[tuple[Callable[..., Sequence[Any]], tuple[Hashable, ...], tuple[Hashable, ...], Event | None]] = []
        self._constants: list[tuple[Hashable, Callable[[], Any]]] = []

    def run(
        self, fn: Callable[..., Sequence[Any]], inputs: Iterable[Hashable], outputs: Iterable[Hashable], event: Event | None = None
    ) -> None:
        """Appends a function of arrays, which gives a sequence of arrays."""
        self._made.append((fn, tuple(inputs), tuple(outputs), event))

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


class Program:
    """A finished tape. `counts` are those of the last run."""

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
        self.counts = Counts()

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
                counts.add(event)
        return [registers[place] for place in self._results]
