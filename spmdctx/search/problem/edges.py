"""The edges of a network: one row per operand or result of the program, summed over the rows with the same ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmdctx.ir.analysis.incidence import executions
from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.analysis.repeats import made_repeats, read_repeats
from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.ir.graph import Graph
from spmdctx.ir.primitives import OUTSIDE


class EdgeRow(NamedTuple):
    """One row: result `result` of `source` goes to operand `position` of `target`, `times` a step.

    `weight` is less where part of its communication hides; `value` is one of the values that do.
    """

    source: int
    result: int
    target: int
    position: int
    narrow: bool
    weight: float
    times: float
    value: int


class EdgeRows(NamedTuple):
    """The columns of many rows; see `EdgeRow`."""

    sources: IntArray
    results: IntArray
    targets: IntArray
    positions: IntArray
    narrow: BoolArray
    weights: FloatArray
    times: FloatArray
    values: IntArray

    def where(self, chosen: IntArray | BoolArray) -> EdgeRows:
        """Returns the rows that are chosen."""
        ends = self.sources[chosen], self.results[chosen], self.targets[chosen], self.positions[chosen]
        return EdgeRows(*ends, self.narrow[chosen], self.weights[chosen], self.times[chosen], self.values[chosen])

    def before(self, places: Sequence[int], rows: Sequence[EdgeRow]) -> EdgeRows:
        """Inserts more rows, each before the row at its place."""
        if not rows:
            return self
        columns: list[Any] = [np.concatenate([own, added]) for own, added in zip(self, zip(*rows, strict=True), strict=True)]
        return EdgeRows(*columns).where(np.argsort(np.concatenate([2 * np.arange(len(self.values)) + 1, 2 * np.array(places)])))

    def summed(self) -> Iterator[EdgeRow]:
        """Yields one row for all rows with the same ends, in the order of their first rows.

        Its weight and times are sums of theirs, its value is that of the first row.
        """
        if not len(self.values):
            return
        _, key = np.unique(self.sources * (int(self.results.max()) + 1) + self.results, return_inverse=True)
        for column in (self.targets, self.positions, self.narrow.astype(np.int64)):
            key = key * (int(column.max()) + 1) + column
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)
        weights, times = (np.bincount(which, weights=own).astype(np.float64)[order] for own in (self.weights, self.times))
        firsts = self.where(first[order])._replace(weights=weights, times=times)
        yield from map(EdgeRow, *(own.tolist() for own in firsts))


def edge_repeats(graph: Graph) -> tuple[IntArray, IntArray]:
    """Returns how often each op takes its operands, and how often it makes its results."""
    reading = executions(graph)
    making = reading.copy()
    for op in ops_of(graph, OUTSIDE):
        reading[op.id], making[op.id] = read_repeats(graph, op), made_repeats(graph, op)
    return reading, making
