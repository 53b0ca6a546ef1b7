"""Walks along chains of ops: from values to all that is made of them, or that they are made of, through ops of some kind.

Every walk ends after `LONGEST` values, so that no plan waits for a chain that does not end; the caller decides what that means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spmdctx.ir.graph import Graph, Op

LONGEST = 512
"""Values that a walk meets at most: more than any chain has that XLA fuses, of which an optimizer's update makes the longest."""


class Walk:
    """The values that a walk meets, each once: iterating gives one after the other, while `reach` adds what each leads to.

    Attributes:
        met: the values so far, in the order in which they were reached.
        is_cut: whether the walk ended because there were too many.
    """

    def __init__(self, starts: Iterable[int], longest: int = LONGEST) -> None:
        self.met: dict[int, None] = dict.fromkeys(starts)
        self.is_cut = False
        self._left, self._longest = list(self.met), longest

    def __iter__(self) -> Iterator[int]:
        while self._left and not self.is_cut:
            yield self._left.pop()

    def reach(self, values: Iterable[int]) -> None:
        """Lets the walk go on to some values, unless it has met them."""
        for value in values:
            if value in self.met:
                continue
            if len(self.met) >= self._longest:
                self.is_cut = True
                return
            self.met[value] = None
            self._left.append(value)


def ends_below(graph: Graph, walk: Walk, passes: Sequence[bool]) -> Iterator[tuple[int, Op]]:
    """Walks down through the ops of which `passes` holds, and yields each other op that reads a value on the way, with that value.

    Args:
        graph: the step.
        walk: where the walk starts.
        passes: per op whether the walk goes on to its results.
    """
    readers = graph.readers
    for value in walk:
        for op in readers[value]:
            if passes[op.id]:
                walk.reach(op.results)
            else:
                yield value, op
