"""Finds the things that are alike among many: numbers them all at once, from columns or rows of numbers that describe each.

Only things that are equal share a number: nothing is compared by a hash alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmdctx.ir.arrays import IntArray

_MOST = 1 << 62


def numbered(keys: list[int]) -> IntArray:
    """Returns small numbers in place of large ones; equal ones stay equal."""
    found: IntArray = np.unique(np.array(keys, dtype=np.int64), return_inverse=True)[1]
    return found


class Numbering:
    """Numbers that are equal for things that are alike in every column so far."""

    def __init__(self, numbers: IntArray) -> None:
        self._numbers, self._bound = numbers, _bound(numbers)

    def refine(self, column: IntArray, rows: IntArray | slice = slice(None)) -> None:
        """Tells things apart further by a column. If it describes only `rows`, these must differ from all others already."""
        more = _bound(column)
        # Both bounds are at most the number of things afterwards, so their product fits.
        if self._bound * more > _MOST or int(column.min(initial=0)) < 0:
            column = np.unique(column, return_inverse=True)[1]
            self._numbers = np.unique(self._numbers, return_inverse=True)[1]
            self._bound, more = _bound(self._numbers), _bound(column)
        self._numbers, self._bound = self._numbers * more, self._bound * more
        self._numbers[rows] += column

    @property
    def numbers(self) -> IntArray:
        """The numbers, which may be large."""
        return self._numbers

    def classes(self) -> tuple[list[int], IntArray]:
        """Returns the first thing of each class, and the class of each thing."""
        _, firsts, numbers = np.unique(self._numbers, return_index=True, return_inverse=True)
        return firsts.tolist(), numbers


def numbered_rows(own: IntArray, owners: IntArray, items: NDArray[np.integer[Any]]) -> IntArray:
    """Numbers things, from 0 in the order of their firsts. Equal ones have an equal `own` number and equal rows of items.

    Args:
        own: a number per thing.
        owners: the thing of each item, ascending.
        items: the items of all rows, one row behind the other.
    """
    counts = np.bincount(owners, minlength=len(own))
    starts = np.cumsum(counts) - counts
    places = np.arange(len(items)) - starts[owners]
    _, firsts, which = np.unique(_hashes(own, counts, starts, places, items), return_index=True, return_inverse=True)
    first = firsts[which]
    if (own == own[first]).all() and (counts == counts[first]).all() and (items == items[starts[first][owners] + places]).all():
        rank = np.empty(len(firsts), dtype=np.int64)
        rank[np.argsort(firsts)] = np.arange(len(firsts))
        numbers: IntArray = rank[which]
        return numbers
    return _numbered_by_contents(own, np.cumsum(counts), items)


def _hashes(own: IntArray, counts: IntArray, starts: IntArray, places: IntArray, items: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Returns a hash of each thing: a sum over its row of the items, each mixed with its place."""
    mixed = items.astype(np.uint64) * _FACTOR + places.astype(np.uint64)
    mixed = (mixed ^ (mixed >> _SHIFT)) * _FACTOR
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed ^ (mixed >> _SHIFT))])
    found = sums[starts + counts] - sums[starts] + own.astype(np.uint64) * _FACTOR
    hashes: NDArray[np.uint64] = (found ^ (found >> _SHIFT)) * _FACTOR + counts.astype(np.uint64)
    return hashes


_FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
"""An odd factor and a shift by which numbers of 64 bits are mixed."""


def _numbered_by_contents(own: IntArray, ends: IntArray, items: NDArray[np.integer[Any]]) -> IntArray:
    """Does the same where different things have one hash."""
    rows, known = items.tobytes(), dict[tuple[int, bytes], int]()
    ends = ends * items.itemsize
    places = zip(own.tolist(), [0, *ends.tolist()], ends.tolist(), strict=False)
    return np.array([known.setdefault((head, rows[start:end]), len(known)) for head, start, end in places], dtype=np.int64)


def _bound(numbers: IntArray) -> int:
    return int(numbers.max(initial=0)) + 1
