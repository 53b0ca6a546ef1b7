"""A process's part of a global array: finds its distinct blocks, and assembles the array from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from spmdctx.errors import StrategyError

Bounds = tuple[tuple[int, int], ...]
"""Start and end of a block in each dimension."""

_ALIGNMENT = 64
"""Bytes. The CPU backend takes over an array that starts at a multiple of this, and copies others."""


class Part(NamedTuple):
    """The part of an array that some devices hold.

    `blocks` are the distinct blocks, each with the devices that hold it. `dims` are the distinct ranges of each dimension, ascending.
    """

    blocks: tuple[tuple[Bounds, tuple[Any, ...]], ...]
    dims: tuple[Bounds, ...]

    @property
    def is_grid(self) -> bool:
        """True if the blocks are all combinations of the ranges, so that they make up one local array."""
        return len(self.blocks) == math.prod(len(ranges) for ranges in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local array that has the ranges of each dimension one after the other."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.dims)

    def local_bounds(self, bounds: Bounds) -> Bounds:
        """Returns the bounds of a block in the local array."""
        found = []
        for ranges, (start, stop) in zip(self.dims, bounds, strict=True):
            before = sum(end - begin for begin, end in ranges if begin < start)
            found.append((before, before + stop - start))
        return tuple(found)


@lru_cache(maxsize=1024)
def part_of(sharding: Sharding, shape: tuple[int, ...], process: int | None = None) -> Part:
    """Returns the part of an array of `shape` that a process holds; by default this process.

    Raises:
        ValueError: a dimension does not divide.
    """
    sharding.shard_shape(shape)
    holders: dict[Bounds, list[Any]] = {}
    wanted = jax.process_index() if process is None else process
    places: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in places.items():
        if device.process_index == wanted:
            bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            holders.setdefault(bounds, []).append(device)
    blocks = tuple((bounds, tuple(devices)) for bounds, devices in sorted(holders.items(), key=lambda item: item[0]))
    dims = tuple(tuple(sorted({bounds[dim] for bounds, _ in blocks})) for dim in range(len(shape)))
    return Part(blocks, dims)


class Piece(NamedTuple):
    """A leaf to place: its global shape and sharding, the function that reads a block, and whether all of it is in memory."""

    shape: tuple[int, ...]
    sharding: Sharding
    read: Callable[[Bounds], Any]
    in_memory: bool = False


def assemble(pieces: Sequence[Piece]) -> list[jax.Array]:
    """Assembles the global arrays; reads each distinct block of this process once, and puts all on their devices together."""
    arrays: list[Any] = []
    targets: list[Any] = []
    counts = []
    for piece in pieces:
        blocks = _blocks(piece)
        for bounds, holders in blocks:
            block = np.asarray(piece.read(bounds))
            expected = tuple(stop - start for start, stop in bounds)
            if block.shape != expected:
                raise StrategyError(f"A block has shape {block.shape}.", got=f"for {_text(bounds)}", need=f"shape {expected}")
            device = holders[0] if holders else next(iter(piece.sharding.device_set))
            block = _owned(block) if device.platform == "cpu" else block
            arrays.extend([block] * max(len(holders), 1))
            targets.extend(holders or [piece.sharding])
        counts.append(sum(len(holders) for _, holders in blocks))
    placed = iter(jax.device_put(arrays, targets))
    return [_joined(piece, count, placed) for piece, count in zip(pieces, counts, strict=True)]


def _blocks(piece: Piece) -> tuple[tuple[Bounds, tuple[Any, ...]], ...]:
    """Returns the blocks to read with their devices; a block without devices is the whole, which JAX splits faster by itself."""
    part = part_of(piece.sharding, piece.shape)
    if piece.in_memory and piece.sharding.is_fully_addressable:
        is_cpu = part.blocks[0][1][0].platform == "cpu"
        if not is_cpu or all(len(ranges) == 1 for ranges in part.dims[1:]):  # on CPU, blocks are copied but once
            return ((tuple((0, size) for size in piece.shape), ()),)
    return part.blocks


def _joined(piece: Piece, count: int, placed: Iterator[Any]) -> jax.Array:
    if count == 0:
        whole: jax.Array = next(placed)
        return whole
    return jax.make_array_from_single_device_arrays(piece.shape, piece.sharding, [next(placed) for _ in range(count)])


def slices(bounds: Bounds) -> tuple[slice, ...]:
    """Converts bounds to the index of an array."""
    return tuple(slice(start, stop) for start, stop in bounds)


def _owned(block: NDArray[Any]) -> NDArray[Any]:
    """Copies a block to memory that the CPU backend may take over, since the caller may write to its own memory again."""
    if block.nbytes == 0 or block.dtype.hasobject:
        return block
    memory = np.empty(block.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + block.nbytes].view(block.dtype).reshape(block.shape)
    copy[...] = block
    return copy


def _text(bounds: Bounds) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in bounds) + "]"
