"""Which of many things are alike: numbers for all of them at once, from columns of numbers that say what each is."""

from __future__ import annotations

import numpy as np

from spmdctx.ir.arrays import IntArray, WordArray

_MOST = 1 << 62


def numbered(keys: list[int]) -> IntArray:
    """Small numbers in place of large ones."""
    found: IntArray = np.unique(np.array(keys, dtype=np.int64), return_inverse=True)[1]
    return found


class Numbering:
    """Equal numbers for what is alike in every column so far."""

    def __init__(self, numbers: IntArray) -> None:
        self._numbers, self._bound = numbers, _bound(numbers)

    def refine(self, column: IntArray, rows: IntArray | slice = slice(None)) -> None:
        """Tells some of them apart further; the others are unlike those before."""
        more = _bound(column)
        if self._bound * more > _MOST:
            self._numbers = np.unique(self._numbers, return_inverse=True)[1]
            self._bound = _bound(self._numbers)
        self._numbers, self._bound = self._numbers * more, self._bound * more
        self._numbers[rows] += column

    def classes(self) -> tuple[list[int], IntArray]:
        """The first of each class, and the class of each."""
        _, firsts, numbers = np.unique(self._numbers, return_index=True, return_inverse=True)
        return firsts.tolist(), numbers


def mixed(numbers: WordArray) -> WordArray:
    """A bijection that spreads every bit (the finaliser of MurmurHash3)."""
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ (numbers >> np.uint64(33))


def _bound(numbers: IntArray) -> int:
    return int(numbers.max(initial=0)) + 1
