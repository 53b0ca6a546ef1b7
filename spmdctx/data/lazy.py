"""Leaves that are read by blocks; slices and pads every leaf."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmdctx.data.blocks import Bounds, slices
from spmdctx.errors import StrategyError, message


class Blocks:
    """Some rows of an array that is read by blocks: a memory-mapped file, an HDF5 or Zarr dataset, or the user's own class.

    A batch with such a leaf is a whole batch; each process reads the blocks of it that its devices hold, each once.
    """

    def __init__(self, array: Any, rows: range | NDArray[np.integer[Any]] | None = None) -> None:
        """Takes `array`, which has `shape`, `dtype` and `__getitem__` with a tuple of slices.

        Args:
            array: what is read; dimension 0 counts rows.
            rows: which rows, in this order; all by default.

        Raises:
            TypeError: an array without shape, dtype or `__getitem__`.
        """
        if not all(hasattr(array, name) for name in ("shape", "dtype", "__getitem__")) or not len(array.shape):
            raise TypeError(
                message(
                    "Blocks are read from an array.",
                    got=type(array).__name__,
                    need="shape of one or more dimensions, dtype, and __getitem__ that takes a tuple of slices",
                )
            )
        self._array = array
        self._rows = range(array.shape[0]) if rows is None else rows
        self.shape: tuple[int, ...] = (len(self._rows), *array.shape[1:])
        self.dtype = np.dtype(array.dtype)

    def __repr__(self) -> str:
        return f"<spmdctx.data.Blocks {self.dtype}{list(self.shape)} of {type(self._array).__name__}>"

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        """Reads the block at a tuple of slices.

        Raises:
            StrategyError: the array is mapped from a file that has become shorter.
        """
        _check_mapped(self._array)
        index = index if isinstance(index, tuple) else (index,)
        rows, rest = self._rows[index[0]], index[1:]
        array: Any = self._array
        if isinstance(rows, range) and rows.step == 1:
            return np.asarray(array[(slice(rows.start, rows.stop), *rest)])
        numbers = np.asarray(rows)
        if isinstance(self._array, np.ndarray):
            return np.asarray(array[(numbers, *rest)])
        # For classes that take only slices: one read for each run of neighbouring rows, ascending for those that read forward.
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        starts = np.flatnonzero(np.diff(ascending, prepend=ascending[:1] - 2) != 1)
        runs = [array[(slice(int(run[0]), int(run[-1]) + 1), *rest)] for run in np.split(ascending, starts[1:])]
        found = np.concatenate([np.asarray(run) for run in runs])
        result = np.empty_like(found)
        result[order] = found
        return result


def _check_mapped(array: Any) -> None:
    """Refuses a mapped file whose end is gone: the system ends a process that reads there."""
    while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
        array = array.base
    mapped: Any = getattr(array, "base", None)
    if isinstance(array, np.memmap) and isinstance(mapped, mmap.mmap):
        need, found = int(array.offset) + array.nbytes, mapped.size()
        if found < need:
            raise StrategyError(
                "A mapped file has become shorter.", where=str(array.filename), got=f"{found} bytes", need=f"{need} bytes, as it had"
            )


def is_read_by_blocks(leaf: Any) -> bool:
    """Returns whether a leaf of a batch is a handle to read from: Blocks, or an object with shape and slices but no NumPy array."""
    if isinstance(leaf, Blocks):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") and not hasattr(leaf, "__array__")


def reader(leaf: Any, rows: int | None, padding: str = "edge") -> Callable[[Bounds], Any]:
    """Makes the function that reads a block of a leaf.

    Args:
        leaf: an array, or a leaf that is read by blocks.
        rows: how many rows of the leaf are real; the rows after them are padding. None means all.
        padding: "edge" repeats the last real row, "zero" gives zeros.
    """

    def read(bounds: Bounds) -> Any:
        if rows is None or not bounds or bounds[0][1] <= rows:
            return leaf[slices(bounds)]
        start, stop = bounds[0]
        if padding == "zero":
            real = leaf[slices(((min(start, rows), rows), *bounds[1:]))]
            return np.concatenate([real, np.zeros((stop - start - real.shape[0], *real.shape[1:]), real.dtype)])
        if rows == 0:
            raise StrategyError("A batch without rows cannot be padded with its last row.")
        real = np.asarray(leaf[slices(((min(start, rows - 1), rows), *bounds[1:]))])
        real, last = (real if start < rows else real[:0]), real[-1:]
        return np.concatenate([real, np.repeat(last, stop - start - real.shape[0], axis=0)])

    return read
