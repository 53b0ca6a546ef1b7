"""Batches of arrays in files or in memory, read by blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spmdctx.data.lazy import Blocks
from spmdctx.errors import StrategyError, message


def arrays(tree: Any, batch_size: int, *, shuffle: int | None = None, epochs: int | None = 1) -> ArrayBatches:
    """Makes batches of consecutive rows of arrays of equal length for `spmdctx.data.shard`, which reads only this process's blocks.

    Args:
        tree: a pytree of arrays: NumPy's, memory-mapped ones (`np.load(path, mmap_mode="r")`), HDF5 or Zarr datasets, or objects
            with `shape`, `dtype` and `__getitem__` that takes a tuple of slices.
        batch_size: rows of the whole batch; the last batch of an epoch may have fewer.
        shuffle: a seed. Each epoch then has its own order, the same in all processes.
        epochs: how often all rows are read; None means without end.

    Raises:
        StrategyError: arrays have different lengths, or the batch size or number of epochs is below 1.
        TypeError: a leaf is not an array.
    """
    leaves = [Blocks(leaf) for leaf in jax.tree.leaves(tree)]
    lengths = sorted({leaf.shape[0] for leaf in leaves})
    if len(lengths) != 1:
        raise StrategyError("The arrays have different numbers of rows.", got=", ".join(map(str, lengths)) or "no arrays")
    for name, value in (("batch_size", batch_size), ("epochs", epochs)):
        if type(value) is not int and not (name == "epochs" and value is None):
            raise TypeError(message(f"{name} is a number.", got=f"{value!r} of type {type(value).__name__}", need="an int >= 1"))
        if value is not None and value < 1:
            raise StrategyError(f"{name} is {value}.", need="an int >= 1")
    return ArrayBatches(tree, lengths[0], batch_size, shuffle, epochs)


class ArrayBatches:
    """An iterable of batches whose leaves are `Blocks`; made by `spmdctx.data.arrays`."""

    def __init__(self, tree: Any, length: int, batch_size: int, shuffle: int | None, epochs: int | None) -> None:
        self._tree, self._length, self._batch_size = tree, length, batch_size
        self._shuffle, self._epochs = shuffle, epochs

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch, including a last one with fewer rows."""
        return -(-self._length // self._batch_size)

    def __iter__(self) -> ArrayIterator:
        return ArrayIterator(self)

    def order(self, epoch: int) -> range | np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the rows of an epoch in their order."""
        if self._shuffle is None:
            return range(self._length)
        return np.random.default_rng([self._shuffle, epoch]).permutation(self._length)

    def batch(self, order: range | np.ndarray[Any, np.dtype[np.int64]], number: int) -> Any:
        """Returns batch `number` of an epoch of that order."""
        start = number * self._batch_size
        rows = order[start : start + self._batch_size]
        return jax.tree.map(lambda leaf: Blocks(leaf, rows), self._tree)

    def has_epoch(self, epoch: int) -> bool:
        """Returns whether there is an epoch of that number."""
        return self._length > 0 and (self._epochs is None or epoch < self._epochs)


class ArrayIterator:
    """A position in the batches of `arrays`, which can be taken and set."""

    def __init__(self, batches: ArrayBatches) -> None:
        self._batches = batches
        self.set_state({"epoch": 0, "batch": 0})

    def __iter__(self) -> ArrayIterator:
        return self

    def __next__(self) -> Any:
        if self._batch == self._batches.batches_per_epoch:
            self.set_state({"epoch": self._epoch + 1, "batch": 0})
        if not self._batches.has_epoch(self._epoch):
            raise StopIteration
        self._batch += 1
        return self._batches.batch(self._order, self._batch - 1)

    def get_state(self) -> dict[str, int]:
        """Returns the position: the epoch, and how many of its batches were given out."""
        return {"epoch": self._epoch, "batch": self._batch}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Goes to a position that `get_state` returned."""
        self._epoch, self._batch = state["epoch"], state["batch"]
        self._order = self._batches.order(self._epoch) if self._batches.has_epoch(self._epoch) else range(0)
