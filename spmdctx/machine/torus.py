"""Places the devices of a TPU slice on its torus, and finds the directions that a group of them spans.

A slice of `n` chips is taken to be as near to a cube as powers of two allow, the shorter sides first: 8 chips are 2x4 on a 2-D
torus, 2x2x2 on a 3-D one. Its devices are in JAX's order: the four chips of a host in a square, hosts along x, then y, then z.
A direction closes into a ring if its side is a multiple of `Topology.ring_side`; on a 3-D torus all sides must be
(cloud.google.com/tpu/docs/system-architecture-tpu-vm).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import IntArray
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.topology import Topology

_HOST_SIDE = 2


class Span(NamedTuple):
    """A direction that a group spans: the chips from end to end, and whether they close into a ring."""

    side: int
    is_closed: bool


@lru_cache(maxsize=256)
def slice_sides(num_devices: int, num_dims: int) -> tuple[int, ...]:
    """Returns the sides of the slice, the shorter first; a count that is no power of two is one long line."""
    if num_devices & (num_devices - 1):
        return (*(1,) * (num_dims - 1), num_devices)
    exponent = num_devices.bit_length() - 1
    return tuple(2 ** ((exponent + place) // num_dims) for place in range(num_dims))


def coordinates(index: IntArray, sides: tuple[int, ...]) -> list[IntArray]:
    """Returns the coordinates of devices by their numbers, one array for each direction."""
    blocks = [min(side, _HOST_SIDE) if place < 2 else 1 for place, side in enumerate(sides)]
    inside, outside = [], []
    for block in blocks:
        index, rest = np.divmod(index, block)
        inside.append(rest)
    for block, side in zip(blocks, sides, strict=True):
        index, rest = np.divmod(index, side // block)
        outside.append(rest)
    return [block * far + near for block, far, near in zip(blocks, outside, inside, strict=True)]


def scatters_over_slice(num_devices: int, num_dims: int) -> bool:
    """Returns whether XLA reduce-scatters over all chips of a slice: not on a 3-D torus, nor over a square of more than four chips.

    The evidence is in `machine.xla.reductions`. Over a part of the chips XLA always does.
    """
    sides = slice_sides(num_devices, num_dims)
    return num_dims < 3 and (num_devices <= 4 or sides[0] != sides[-1])


@lru_cache(maxsize=4096)
def spans_of(axes: AxisNames, mesh: LogicalMesh, topology: Topology) -> tuple[Span, ...]:
    """Returns the directions that the group of `axes` spans inside one slice, the longest first.

    All groups of the same axes are taken to lie like the group of device 0.
    """
    num_devices = min(mesh.num_devices, topology.devices_per_host)
    sides = slice_sides(num_devices, topology.torus_dims)
    stride, steps = 1, []
    for name, size in reversed(mesh.axes):
        if name in axes:
            steps.append([stride * place for place in range(size) if stride * place < num_devices])
        stride *= size
    members = np.zeros(1, dtype=np.int64)
    for own in steps:
        members = (members[:, None] + np.array(own)).ravel()
    boxes = [int(np.ptp(column)) + 1 for column in coordinates(members[members < num_devices], sides)]
    whole = topology.torus_dims < 3 or all(side % topology.ring_side == 0 for side in sides)
    found = [Span(box, whole and box == side and side % topology.ring_side == 0) for box, side in zip(boxes, sides, strict=True) if box > 1]
    return tuple(sorted(found, reverse=True))
