"""Pairs planned collectives with compiled ones, one for one and as many as can be, whatever was paired first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Pair(NamedTuple):
    """`executions` of the planned collective at one place, found in those of a compiled one in the way numbered."""

    planned: int
    compiled: int
    executions: int
    way: int


@dataclass
class _Search:
    """How a search came to compiled collectives, in which way, and to planned ones."""

    to_compiled: dict[int, tuple[int, int]] = field(default_factory=dict)
    to_planned: dict[int, int] = field(default_factory=dict)


class Pairs:
    """A matching that grows along augmenting paths: `left_planned` and `left_compiled` are the executions not paired yet."""

    def __init__(self, left_planned: Sequence[int], left_compiled: Sequence[int]) -> None:
        self.left_planned, self.left_compiled = list(left_planned), list(left_compiled)
        # By compiled collective: the executions of each planned one that it realises, and the way.
        self._pairs: list[dict[int, tuple[int, int]]] = [{} for _ in left_compiled]
        self._num_paired = [0] * len(left_planned)

    def add(self, planned: int, compiled: int, way: int) -> None:
        """Pairs all that is left of two collectives."""
        count = min(self.left_planned[planned], self.left_compiled[compiled])
        self._change(planned, compiled, count, way)
        self.left_planned[planned] -= count
        self.left_compiled[compiled] -= count

    def improve(self, fits: Callable[[int], Iterator[tuple[int, int]]], in_loop: Sequence[bool]) -> None:
        """Pairs anew, where that leaves fewer planned collectives, or those of a loop in place of others.

        The compiler may run what is the same in every iteration once, so one execution is enough for those.

        Args:
            fits: yields the compiled collectives, with the way, that may realise a planned one.
            in_loop: whether each planned collective runs more than once.
        """
        known: dict[int, list[tuple[int, int]]] = {}
        for start in range(len(self.left_planned)):
            while self.left_planned[start] and self._augment(start, fits, known, in_loop):
                pass

    def found(self) -> Iterator[Pair]:
        """Yields the pairs."""
        for compiled, own in enumerate(self._pairs):
            for planned, (count, way) in own.items():
                yield Pair(planned, compiled, count, way)

    def _change(self, planned: int, compiled: int, count: int, way: int) -> None:
        own = self._pairs[compiled]
        before, known = own.get(planned, (0, way))
        own[planned] = before + count, known
        if not own[planned][0]:
            del own[planned]
        self._num_paired[planned] += count

    def _augment(
        self,
        start: int,
        fits: Callable[[int], Iterator[tuple[int, int]]],
        known: dict[int, list[tuple[int, int]]],
        in_loop: Sequence[bool],
    ) -> bool:
        """Finds a place for an execution of a planned collective; returns whether there is one."""
        search, waiting = _Search(), [start]
        for planned in waiting:
            if planned not in known:
                known[planned] = list(fits(planned))
            for compiled, way in known[planned]:
                if compiled in search.to_compiled:
                    continue
                search.to_compiled[compiled] = planned, way
                if self.left_compiled[compiled]:
                    self.left_compiled[compiled] -= 1
                    self._move(start, compiled, search)
                    return True
                for other in self._pairs[compiled]:
                    if other == start or other in search.to_planned:
                        continue
                    search.to_planned[other] = compiled
                    if in_loop[other] and self._num_paired[other] > 1 and not in_loop[start]:
                        self._change(other, compiled, -1, 0)
                        self.left_planned[other] += 1
                        self._move(start, compiled, search)
                        return True
                    waiting.append(other)
        return False

    def _move(self, start: int, compiled: int, search: _Search) -> None:
        """Pairs one execution along the path that ends at a compiled collective, which has room for it."""
        while True:
            planned, way = search.to_compiled[compiled]
            self._change(planned, compiled, 1, way)
            if planned == start:
                self.left_planned[start] -= 1
                return
            compiled = search.to_planned[planned]
            self._change(planned, compiled, -1, 0)
