"""The tables that forbid pairs of shardings of coupled tensors; see `search.setup.request.Coupling`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.ir.domain import domain
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.search.setup.request import Coupling


def allowed_pairs(mesh: LogicalMesh, shape: tuple[int, ...], own: IntArray, other: IntArray, coupling: Coupling) -> FloatArray:
    """Returns 0 where a parameter's sharding (rows) goes with the sharding of the coupled tensor (columns), else infinity."""
    if coupling.how == "within":
        bits = _bits(mesh, shape)
        fits = (bits[other][None, :] & ~bits[own][:, None]) == 0
    else:
        wanted = own if coupling.how == "alike" else _further(mesh, shape, coupling.dim)[own]
        fits = wanted[:, None] == other[None, :]
    return np.where(fits, 0.0, np.inf)


def allowed_alone(mesh: LogicalMesh, shape: tuple[int, ...], numbers: IntArray, dim: int) -> FloatArray:
    """Returns 0 for the shardings of a tensor that come from some sharding by adding all other axes to `dim`, else infinity."""
    return np.where(np.isin(numbers, _further(mesh, shape, dim)), 0.0, np.inf)


@lru_cache(maxsize=1024)
def _further(mesh: LogicalMesh, shape: tuple[int, ...], dim: int) -> IntArray:
    """Returns for each sharding of a shape the number of the one that adds all other axes to a dimension.

    A sharding stays itself if the dimension does not divide so.
    """
    known = domain(mesh, shape)
    found = []
    for number, sharding in enumerate(known.shardings):
        used = {name for names in sharding for name in names}
        rest = tuple(name for name, size in mesh.axes if size > 1 and name not in used)
        target = known.number((*sharding[:dim], sharding[dim] + rest, *sharding[dim + 1 :]))
        found.append(number if target < 0 else target)
    return np.array(found, dtype=np.int64)


@lru_cache(maxsize=1024)
def _bits(mesh: LogicalMesh, shape: tuple[int, ...]) -> IntArray:
    known = domain(mesh, shape)
    found: IntArray = np.bitwise_or.reduce(known.codes.bits[known.rows], axis=1, initial=0)
    return found
