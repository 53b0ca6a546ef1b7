"""The prices of reductions and scatters of partial results, as arrays over the axes that they use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.ir.domain import axis_codes, domain
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.collectives import LinearPrice, collective_price
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.reductions import are_scattered, in_order


class Scatters(NamedTuple):
    """The codes over which results that are partial over some axes can be scattered, as arrays per code.

    `is_some` says that other axes are left to reduce, which takes `fixed_s` and `s_per_byte`. `follows` says whether the axes of the code
    lie in the order of the partial results.
    """

    fits: BoolArray
    is_some: BoolArray
    fixed_s: FloatArray
    s_per_byte: FloatArray
    follows: BoolArray


class ReductionPrices:
    """The prices of all reductions on one mesh of one machine."""

    def __init__(self, mesh: LogicalMesh, machine: Topology) -> None:
        self._mesh, self._machine, self._codes = mesh, machine, axis_codes(mesh)
        self._prices: dict[tuple[str, AxisNames], LinearPrice] = {}
        self._scatters: dict[tuple[AxisNames, bool], Scatters] = {}

    def price(self, kind: str, axes: AxisNames) -> LinearPrice:
        """Returns the price of a collective that reduces over some axes, nothing over none."""
        found = self._prices.get((kind, axes))
        if found is None:
            found = collective_price(kind, axes, self._mesh, self._machine) if axes else LinearPrice(0.0, 0.0)
            self._prices[kind, axes] = found
        return found

    def lines(self, kind: str, every: Sequence[AxisNames]) -> tuple[FloatArray, FloatArray]:
        """Returns the prices of a collective over several groups of axes: fixed seconds, and seconds per byte."""
        fixed_s, s_per_byte = np.array([self.price(kind, axes) for axes in every]).T
        return fixed_s, s_per_byte

    def scatters(self, partial: AxisNames, some: bool) -> Scatters:
        """Returns the scatters of results that are partial over some axes; only with `some` may they leave axes to reduce."""
        found = self._scatters.get((partial, some))
        if found is None:
            axes, wanted = self._codes.axes, set(partial)
            fits = [bool(own) and (set(own) == wanted or (some and set(own) < wanted)) for own in axes]
            rests = [tuple([name for name in partial if name not in own]) if fit else () for own, fit in zip(axes, fits, strict=True)]
            follows = np.array([in_order(own, partial) for own in axes])
            found = Scatters(np.array(fits), np.array([bool(rest) for rest in rests]), *self.lines("all_reduce", rests), follows)
            self._scatters[partial, some] = found
        return found


@lru_cache(maxsize=64)
def reductions_on(mesh: LogicalMesh, machine: Topology) -> ReductionPrices:
    """Returns the prices of the reductions on a mesh of a machine."""
    return ReductionPrices(mesh, machine)


@lru_cache(maxsize=1024)
def extended(mesh: LogicalMesh, shape: tuple[int, ...]) -> IntArray:
    """Returns the sharding after the axes of a code join a dimension, minor-most, as [number, code, dim].

    It is -1 if there is no such sharding.
    """
    known, codes = domain(mesh, shape), axis_codes(mesh)
    found = np.empty((len(known), len(codes), len(shape)), dtype=np.int64)
    for added in range(len(codes)):
        for dim in range(len(shape)):
            after = known.rows.copy()
            after[:, dim] = codes.joined[after[:, dim], added]
            found[:, added, dim] = known.numbers(after)
    return found


@lru_cache(maxsize=1024)
def whole_words(mesh: LogicalMesh, shape: tuple[int, ...], num_bytes: int) -> BoolArray:
    """Returns whether XLA scatters into a sharding along a dimension by a reduce_scatter, as [mesh, number, dim].

    There are several meshes if `mesh` stands for meshes of several sizes.
    """
    rows, sizes = domain(mesh, shape).rows, np.array(shape, dtype=np.int64)
    return np.array([are_scattered(-(-sizes // each[rows]), num_bytes) for each in axis_codes(mesh).each])
