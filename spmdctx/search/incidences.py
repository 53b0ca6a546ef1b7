"""Where values meet ops, as arrays: what is done for each operand of a large program is done for all of them at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmdctx.ir import Graph

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_OPERANDS, _RESULTS = itemgetter(2), itemgetter(3)


class Incidences(NamedTuple):
    """Operands and results of all ops, in the order of the ops, an op's operands before its results.

    `positions` counts the operands or the results of one op.
    """

    ops: IntArray
    values: IntArray
    slots: IntArray
    positions: IntArray
    is_result: BoolArray

    def where(self, kept: BoolArray) -> Incidences:
        """Some of them."""
        return Incidences(self.ops[kept], self.values[kept], self.slots[kept], self.positions[kept], self.is_result[kept])


def incidences(graph: Graph, slot_of: Sequence[int], left_out: Collection[int]) -> Incidences:
    """All but literals and those of the slots `left_out`."""
    num_operands, num_results = (np.array([len(own) for own in map(side, graph.ops)], dtype=np.int64) for side in (_OPERANDS, _RESULTS))
    counts = num_operands + num_results
    total = int(counts.sum())
    sides = chain.from_iterable((op[2], op[3]) for op in graph.ops)
    values = np.fromiter(chain.from_iterable(sides), dtype=np.int64, count=total)
    ops = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    is_result = places >= num_operands[ops]
    positions = np.where(is_result, places - num_operands[ops], places)
    every = Incidences(ops, values, np.array([*slot_of, -1], dtype=np.int64)[values], positions, is_result)
    out = np.zeros(len(slot_of) + 1, dtype=bool)
    out[-1] = True
    out[list(left_out)] = True
    return every.where(~out[every.slots])
