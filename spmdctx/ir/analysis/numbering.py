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
    ends = np.cumsum(np.bincount(owners, minlength=len(own))) * items.itemsize
    rows, known = items.tobytes(), dict[tuple[int, bytes], int]()
    places = zip(own.tolist(), [0, *ends.tolist()], ends.tolist(), strict=False)
    return np.array([known.setdefault((head, rows[start:end]), len(known)) for head, start, end in places], dtype=np.int64)


def _bound(numbers: IntArray) -> int:
    return int(numbers.max(initial=0)) + 1
