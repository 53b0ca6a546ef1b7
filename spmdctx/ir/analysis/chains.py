"""Walks along chains of ops, from a value to the values computed from it, or back to those from which it is computed.

A walk that meets more than `LONGEST` values is cut, so that its time is bounded. The caller decides what a cut walk means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spmdctx.ir.graph import Graph, Op

LONGEST = 512
"""The most values that a walk meets. The longest chains that XLA fuses, updates of optimizers, have some hundred."""


class Walk:
    """A walk that meets each value once: iteration yields one after the other, and `reach` adds the values that the last one leads to.

    Attributes:
        met: The values so far, in the order in which the walk reached them.
        is_cut: True if the walk ended because there were too many values.
    """

    def __init__(self, starts: Iterable[int], longest: int = LONGEST) -> None:
        self.met: dict[int, None] = dict.fromkeys(starts)
        self.is_cut = False
        self._left, self._longest = list(self.met), longest

    def __iter__(self) -> Iterator[int]:
        while self._left and not self.is_cut:
            yield self._left.pop()

    def reach(self, values: Iterable[int]) -> None:
        """Adds the values that the walk has not met yet."""
        for value in values:
            if value in self.met:
                continue
            if len(self.met) >= self._longest:
                self.is_cut = True
                return
            self.met[value] = None
            self._left.append(value)


def ends_below(graph: Graph, walk: Walk, passes: Sequence[bool]) -> Iterator[tuple[int, Op]]:
    """Walks down through the ops that `passes` marks, and yields the other readers of each value, with the value.

    Args:
        graph: The step.
        walk: The walk, at its start.
        passes: A flag for each op: True if the walk goes on to its results.
    """
    readers = graph.readers
    for value in walk:
        for op in readers[value]:
            if passes[op.id]:
                walk.reach(op.results)
            else:
                yield value, op
