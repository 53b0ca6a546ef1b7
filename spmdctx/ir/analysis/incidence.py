"""The places where values meet ops, as arrays, so that work on each operand of a large program is done for all at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import BoolArray, IntArray
from spmdctx.ir.graph import LITERAL, Graph

_OPERANDS, _RESULTS, _REPEATS = itemgetter(2), itemgetter(3), itemgetter(6)


class Incidences(NamedTuple):
    """Operands and results of all ops, in the order of the ops; the operands of an op come before its results.

    `positions` counts the operands or the results of one op. `slots` is the slot of each value.
    """

    ops: IntArray
    values: IntArray
    slots: IntArray
    positions: IntArray
    is_result: BoolArray

    def where(self, kept: BoolArray) -> Incidences:
        """Returns the incidences that `kept` marks."""
        return Incidences(self.ops[kept], self.values[kept], self.slots[kept], self.positions[kept], self.is_result[kept])


class Ends(NamedTuple):
    """Operands and results of all ops, literals too, in the order of the ops.

    `places` counts the ends of one op, operands first. `num_operands` and `num_results` have one number per op.
    """

    ops: IntArray
    values: IntArray
    places: IntArray
    num_operands: IntArray
    num_results: IntArray

    @property
    def is_result(self) -> BoolArray:
        """A flag for each end: True for results."""
        found: BoolArray = self.places >= self.num_operands[self.ops]
        return found

    @property
    def results(self) -> tuple[IntArray, IntArray]:
        """The ops and the values of all results."""
        made = self.is_result
        return self.ops[made], self.values[made]

    @property
    def first_results(self) -> IntArray:
        """The first result of each op, `LITERAL` for an op without results."""
        found, first = np.full(len(self.num_results), LITERAL, dtype=np.int64), self.places == self.num_operands[self.ops]
        found[self.ops[first]] = self.values[first]
        return found


def ends(graph: Graph) -> Ends:
    """Returns the operands and results of a graph's ops."""
    known: Ends | None = graph.facts.get(ends)
    if known is None:
        num_operands, num_results = (np.array([*map(len, map(side, graph.ops))], dtype=np.int64) for side in (_OPERANDS, _RESULTS))
        counts = num_operands + num_results
        total = int(counts.sum())
        sides = chain.from_iterable([op[2:4] for op in graph.ops])
        values = np.fromiter(chain.from_iterable(sides), dtype=np.int64, count=total)
        places = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        known = graph.facts[ends] = Ends(np.repeat(np.arange(len(counts)), counts), values, places, num_operands, num_results)
    return known


def executions(graph: Graph) -> IntArray:
    """Returns for each op how often it is executed in a step."""
    return np.array([*map(_REPEATS, graph.ops)], dtype=np.int64)


def incidences(graph: Graph, slot_of: Sequence[int], left_out: Collection[int]) -> Incidences:
    """Returns all incidences but those of literals and of the slots `left_out`."""
    every = ends(graph)
    ops, values, places, num_operands, _ = every
    is_result = every.is_result
    positions = np.where(is_result, places - num_operands[ops], places)
    met = Incidences(ops, values, np.array([*slot_of, -1], dtype=np.int64)[values], positions, is_result)
    out = np.zeros(len(slot_of) + 1, dtype=bool)
    out[-1] = True
    out[list(left_out)] = True
    return met.where(~out[met.slots])
