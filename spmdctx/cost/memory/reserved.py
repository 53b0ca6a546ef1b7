"""Counts the memory that XLA reserves for results before they are made.

XLA gives every result of a program that takes no donated argument's memory a buffer of its own for the whole run. Until the result is made,
temporary values that are no larger may lie in the buffer, one at a time. Seen in buffer assignments for v5e, v5p and H100: steps that keep
their old state were planned at 0.71 to 0.94 of what XLA assigns (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmdctx.cost.memory.loops import ValueLife
from spmdctx.ir.arrays import IntArray

_MOST_KINDS = 16
"""Sizes of temporary values that are told apart. Others, those with the fewest bytes, are taken to find a place."""


def reserved_bytes(results: Sequence[ValueLife], others: Sequence[ValueLife], sizes: Sequence[int], num_ops: int) -> IntArray:
    """Returns the bytes at each op of results that are not made yet, without those in which temporary values may lie.

    Args:
        results: the lives of results that have memory of their own.
        others: the lives of temporary values.
        sizes: one device's bytes of each value of the graph.
        num_ops: number of ops of the graph.
    """
    waiting = _rows([(0, life.start, sizes[life.value]) for life in results])
    found: IntArray = _summed(waiting, waiting[:, 2], num_ops)
    most = int(waiting[:, 2].max(initial=0))
    temporary = _rows([(life.start, life.end + 1, sizes[life.value]) for life in others if 0 < sizes[life.value] <= most])
    kinds, kind = np.unique(temporary[:, 2], return_inverse=True)
    heaviest = np.bincount(kind, temporary[:, 2], len(kinds)).argsort(kind="stable")[::-1][:_MOST_KINDS]
    taken: IntArray = np.zeros(num_ops, dtype=np.int64)
    for number in np.sort(heaviest)[::-1].tolist():
        own, fits = temporary[kind == number], waiting[waiting[:, 2] >= kinds[number]]
        places = _summed(fits, np.ones(len(fits), dtype=np.int64), num_ops) - taken
        held = np.clip(_summed(own, np.ones(len(own), dtype=np.int64), num_ops), 0, np.maximum(places, 0))
        taken += held
        found -= held * kinds[number]
    left = temporary[~np.isin(kind, heaviest)]
    least: IntArray = np.maximum(found - _summed(left, left[:, 2], num_ops), 0)
    return least


def _rows(rows: Sequence[tuple[int, int, int]]) -> IntArray:
    """Returns rows of the first op, the op after the last one, and the bytes."""
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _summed(rows: IntArray, amounts: IntArray, count: int) -> IntArray:
    """Returns the sum of amounts at each op, each from the start of its row up to its end."""
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, np.minimum(rows[:, 0], count), amounts)
    np.subtract.at(change, np.minimum(rows[:, 1], count), amounts)
    return np.cumsum(change)[:count]
