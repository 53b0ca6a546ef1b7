"""Tables with equal rows or columns: a small table that has each of them once, and the row and column of every state.

States of an op that take an operand alike have equal columns; states that leave a result alike have equal rows. A minimum over rows
can be taken among equal rows first: adding is monotone in floating point too, so the result is the same to the last bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray, IntArray, WordArray

MIN_SIZE = 4096
"""Entries from which a table is searched for equal lines."""
WORTH = 0.6
"""Share of its entries to which a table must shrink."""


class Classes(NamedTuple):
    """Equal lines of a table: the lines sorted by class, the start of each class among them, and the class of each line."""

    order: IntArray
    starts: IntArray
    of: IntArray

    def firsts(self) -> IntArray:
        """Returns one line of each class."""
        firsts: IntArray = self.order[self.starts]
        return firsts


class Groups(NamedTuple):
    """A table by its distinct rows and columns: entry [i, j] is `small[rows.of[i], columns.of[j]]`."""

    small: FloatArray
    rows: Classes
    columns: Classes

    def transposed(self) -> Groups:
        """Returns the groups of the transposed table."""
        return Groups(np.ascontiguousarray(self.small.T), self.columns, self.rows)


def grouped(table: FloatArray) -> Groups | None:
    """Returns the groups of a table; None if they save little."""
    if table.size < MIN_SIZE:
        return None
    rows = _classes(table)
    lines = table.take(rows.firsts(), axis=0)
    columns = _classes(np.ascontiguousarray(lines.T))
    small = lines.take(columns.firsts(), axis=1)
    if small.size > WORTH * table.size:
        return None
    # Different lines may share a hash.
    equal = (small.take(columns.of, axis=1).take(rows.of, axis=0) == table).all()
    return Groups(small, rows, columns) if equal else None


def content_hash(array: FloatArray) -> int:
    """Returns a number that equal arrays share and different ones hardly ever do."""
    lines = array.reshape(-1, array.shape[-1])
    return int(_mixed(_line_hashes(lines)) @ _weights(len(lines)))


def _classes(table: FloatArray) -> Classes:
    """Groups the rows of a table by their hashes."""
    hashes = _line_hashes(table)
    order = hashes.argsort()
    hashes = hashes[order]
    is_first = np.empty(len(order), dtype=bool)
    is_first[0] = True
    np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
    of = np.empty(len(order), dtype=np.int64)
    of[order] = np.cumsum(is_first) - 1
    return Classes(order, np.flatnonzero(is_first), of)


def _line_hashes(table: FloatArray) -> WordArray:
    hashes: WordArray = np.einsum("ij,j->i", _mixed(table.view(np.uint64)), _weights(table.shape[1]))
    return hashes


def _mixed(words: WordArray) -> WordArray:
    """Mixes the high bits of words into the low ones, since floats of few digits differ only in the high ones."""
    mixed: WordArray = words ^ (words >> np.uint64(32))
    return mixed


def _weights(count: int) -> WordArray:
    return _all_weights(1 << max(count - 1, 0).bit_length())[:count]


@lru_cache(maxsize=32)
def _all_weights(count: int) -> WordArray:
    """Returns odd numbers without a pattern: the outputs of splitmix64 (Steele, Lea and Flood, 2014)."""
    words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: WordArray = (words ^ (words >> np.uint64(31))) | np.uint64(1)
    return found
