"""Finds the things that are alike among many: numbers them all at once, from columns of numbers that describe each."""

from __future__ import annotations

import numpy as np

from spmdctx.ir.arrays import IntArray, WordArray

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
        if self._bound * more > _MOST:
            self._numbers = np.unique(self._numbers, return_inverse=True)[1]
            self._bound = _bound(self._numbers)
        self._numbers, self._bound = self._numbers * more, self._bound * more
        self._numbers[rows] += column

    def classes(self) -> tuple[list[int], IntArray]:
        """Returns the first thing of each class, and the class of each thing."""
        _, firsts, numbers = np.unique(self._numbers, return_index=True, return_inverse=True)
        return firsts.tolist(), numbers


def mixed(numbers: WordArray) -> WordArray:
    """Applies a bijection that spreads every bit (the finaliser of MurmurHash3)."""
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ (numbers >> np.uint64(33))


def _bound(numbers: IntArray) -> int:
    return int(numbers.max(initial=0)) + 1
