"""Counts the memory that XLA reserves for results before they are made.

XLA gives every result of a program that takes no donated argument's memory a buffer of its own for the whole run. Until the result is made,
temporary values that are no larger may lie in the buffer, one at a time. Seen in buffer assignments for v5e, v5p and H100: steps that keep
their old state were planned at 0.71 to 0.94 of what XLA assigns (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from spmdctx.cost.memory.lives import Copy, StepMemory
from spmdctx.cost.memory.loops import ValueLife
from spmdctx.ir.arrays import IntArray

_MOST_KINDS = 16
"""Sizes of temporary values that are told apart. Others, those with the fewest bytes, are taken to find a place."""

_LITTLE = 0.01
"""Share of the peak up to which it does not matter what is reserved for results."""

_MOST_PIECES = 16
"""Pieces of a step, each with one share of what waits to be made."""


class ReservedShare(NamedTuple):
    """Ops `start <= op < end`, and the share of the results made later that is reserved at the fullest of them."""

    start: int
    end: int
    share: float


class Reserved(NamedTuple):
    """The bytes at each op, and what they are of the results that are not made yet, piece by piece of the step."""

    bytes: IntArray
    pieces: tuple[ReservedShare, ...]


def results_of(memory: StepMemory, outputs: Collection[int]) -> list[ValueLife]:
    """Returns the lives of results that have memory of their own."""
    first, end = memory.made
    return [life for life in memory.lives[first:end] if life.value in outputs]


def reserved_in(
    memory: StepMemory, outputs: Collection[int], sizes: Sequence[int], alive: IntArray, copies: Sequence[Copy] = ()
) -> Reserved:
    """Returns what is reserved beside the bytes that are alive at each op; nothing where results take hardly any memory.

    Args:
        memory: when values are in memory.
        outputs: the results of the step.
        sizes: one device's bytes of each value of the graph.
        alive: the bytes alive at each op.
        copies: other temporary values.
    """
    results, count = results_of(memory, outputs), len(alive)
    if not count or sum(sizes[life.value] for life in results) < _LITTLE * alive.max():
        return Reserved(np.zeros(count, dtype=np.int64), ())
    made = [Copy(start, end, sizes[value]) for value, start, end in memory.lives[memory.made[0] :] if value not in outputs]
    found = reserved_bytes(results, [*made, *copies], sizes, count)
    waiting = _waiting(results, sizes, count)
    bounds = np.linspace(0, count, min(_MOST_PIECES, count) + 1).astype(np.int64).tolist()
    pieces = []
    for start, end in pairwise(bounds):
        fullest = start + int((alive + found)[start:end].argmax())
        if found[fullest]:
            pieces.append(ReservedShare(start, end, float(found[fullest] / waiting[fullest])))
    return Reserved(found, tuple(pieces))


def reserved_bytes(results: Sequence[ValueLife], others: Sequence[Copy], sizes: Sequence[int], num_ops: int) -> IntArray:
    """Returns the bytes at each op of results that are not made yet, without those in which temporary values may lie.

    Args:
        results: the lives of results that have memory of their own.
        others: temporary values.
        sizes: one device's bytes of each value of the graph.
        num_ops: number of ops of the graph.
    """
    waiting, found = _rows([(0, life.start, sizes[life.value]) for life in results]), _waiting(results, sizes, num_ops)
    most = int(waiting[:, 2].max(initial=0))
    temporary = _rows([(start, end + 1, num_bytes) for start, end, num_bytes in others if 0 < num_bytes <= most])
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


def _waiting(results: Sequence[ValueLife], sizes: Sequence[int], num_ops: int) -> IntArray:
    """Returns the bytes at each op of results that are not made yet."""
    waiting = _rows([(0, life.start, sizes[life.value]) for life in results])
    return _summed(waiting, waiting[:, 2], num_ops)


def _rows(rows: Sequence[tuple[int, int, int]]) -> IntArray:
    """Returns rows of the first op, the op after the last one, and the bytes."""
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _summed(rows: IntArray, amounts: IntArray, count: int) -> IntArray:
    """Returns the sum of amounts at each op, each from the start of its row up to its end."""
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, np.minimum(rows[:, 0], count), amounts)
    np.subtract.at(change, np.minimum(rows[:, 1], count), amounts)
    return np.cumsum(change)[:count]
