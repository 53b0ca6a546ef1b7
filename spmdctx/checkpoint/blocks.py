"""Blocks of tensors: the block that a rank holds under a layout, the overlap of two blocks, and the layout as a sharding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdctx.errors import CheckpointError
from spmdctx.plan.mindspore.file import ParameterLayout

Block = tuple[tuple[int, int], ...]
"""Start and end in each dimension."""


def block_of(layout: ParameterLayout, rank: int) -> Block:
    """Returns the block that a rank holds.

    Raises:
        CheckpointError: a dimension does not divide into its slices.
    """
    strides = [math.prod(layout.device_matrix[index + 1 :]) for index in range(len(layout.device_matrix))]
    block = []
    for dim, (size, axes) in enumerate(zip(layout.shape, layout.tensor_map, strict=True)):
        spans = [(strides[-1 - axis], layout.device_matrix[-1 - axis]) for axis in axes]
        spans += [(layout.shard_step, layout.shard_size)] if dim == 0 and layout.shard_size else []
        number, slices = 0, 1
        for step, count in spans:
            number, slices = number * count + rank // step % count, slices * count
        if size % slices:
            raise CheckpointError(f"Dimension {dim} of size {size} does not divide into {slices} slices.", got=str(layout))
        block.append((number * (size // slices), (number + 1) * (size // slices)))
    return tuple(block)


def layout_sharding(layout: ParameterLayout, devices: Sequence[Any]) -> NamedSharding:
    """Returns the layout as a sharding over the first of `devices`, which it divides into the layout's axes.

    Raises:
        CheckpointError: the layout does not fit its tensor, its own device matrix, or the number of devices.
    """
    ends = [math.prod(layout.device_matrix[index + 1 :]) for index in range(len(layout.device_matrix))]
    bounds = {1, *ends, math.prod(layout.device_matrix)}
    if layout.shard_size:
        bounds |= {layout.shard_step, layout.shard_step * layout.shard_size}
    strides = sorted(bounds, reverse=True)
    if any(major % minor for major, minor in itertools.pairwise(strides)) or strides[0] > math.prod(layout.device_matrix):
        raise CheckpointError("The optimizer's sharding of a tensor does not fit its device matrix.", got=str(layout))
    axes = {minor: f"axis{index}" for index, minor in enumerate(strides[1:])}

    def between(low: int, high: int) -> tuple[str, ...]:
        return tuple(name for minor, name in axes.items() if low <= minor < high)

    dims = []
    for dim, own in enumerate(layout.tensor_map):
        spans = [(ends[-1 - axis], ends[-1 - axis] * layout.device_matrix[-1 - axis]) for axis in own]
        spans += [(layout.shard_step, layout.shard_step * layout.shard_size)] if dim == 0 and layout.shard_size else []
        dims.append(tuple(name for span in spans for name in between(*span)) or None)
    used = [name for own in dims for name in own or ()]
    if len(set(used)) < len(used):
        raise CheckpointError("The optimizer's sharding of a tensor uses devices that already hold different slices.", got=str(layout))
    block_of(layout, 0)
    sizes = [major // minor for major, minor in itertools.pairwise(strides)] or [1]
    names = tuple(axes.values()) or ("axis0",)
    if len(devices) < math.prod(sizes):
        raise CheckpointError("The layouts need more devices than are there.", got=f"{len(devices)} devices", need=str(math.prod(sizes)))
    grid = np.array(list(devices)[: math.prod(sizes)], dtype=object).reshape(sizes)
    return NamedSharding(Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names)), PartitionSpec(*dims))


def whole(shape: Sequence[int]) -> Block:
    """Returns the block that is the whole tensor."""
    return tuple((0, size) for size in shape)


def shape_of_block(block: Block) -> tuple[int, ...]:
    """Returns the sizes of a block."""
    return tuple(stop - start for start, stop in block)


def overlap(one: Block, other: Block) -> Block | None:
    """Returns the overlap of two blocks, or None if they share nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def within(inner: Block, outer: Block) -> Block:
    """Returns a block relative to the start of another that contains it."""
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(inner, outer, strict=True))


def slices_of(block: Block) -> tuple[slice, ...]:
    """Returns a block as an index."""
    return tuple(slice(start, stop) for start, stop in block)
