"""Translates between tensor shardings and the axes of factors, by the rule of one op on one mesh.

A dimension made of factors f1 f2 ... (major first) can hold axes of f2 only where f1 is split completely. Otherwise the
slices of f2 would not be contiguous. `legal` enforces this over all tensors of a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spmdctx.ir.graph import Op, Value, item_bytes
from spmdctx.ir.mesh import LogicalMesh, local_shape
from spmdctx.ir.rule import DimFactors, OpRule
from spmdctx.ir.sharding import Assignment, AxisNames, TensorSharding

FactorAxes = tuple[AxisNames, ...]


def decompose(axes: AxisNames, factors: DimFactors, sizes: Sequence[int], mesh: LogicalMesh) -> Iterator[tuple[int, AxisNames]]:
    """Deals the axes of one dimension to its factors, major first, as far as they divide the factors' sizes."""
    position = 0
    for factor in factors:
        slices, start = 1, position
        while position < len(axes) and sizes[factor] % (slices * mesh.sizes[axes[position]]) == 0:
            slices *= mesh.sizes[axes[position]]
            position += 1
        if position > start:
            yield factor, axes[start:position]
        if slices != sizes[factor]:
            return


def merge(
    rule: OpRule, tensors: Sequence[tuple[tuple[DimFactors, ...], TensorSharding]], splittable: Sequence[bool], mesh: LogicalMesh
) -> FactorAxes:
    """Returns the axes of each factor, taken from `tensors` in their order: an earlier tensor wins, a later one may extend.

    No two factors of the op use the same axis.
    """
    axes: list[AxisNames] = [()] * len(rule.sizes)
    used: set[str] = set()
    for dims, sharding in tensors:
        for factors, dim_axes in zip(dims, sharding, strict=True):
            if not dim_axes or not factors:
                continue
            for factor, own in decompose(dim_axes, factors, rule.sizes, mesh):
                if splittable[factor]:
                    _extend(axes, used, factor, own)
    return legal(rule, tuple(axes), mesh)


def _extend(axes: list[AxisNames], used: set[str], factor: int, offered: AxisNames) -> None:
    """Extends the axes of a factor by those of `offered`, up to the first that is already used."""
    known = axes[factor]
    if offered[: len(known)] != known:
        return
    for name in offered[len(known) :]:
        if name in used:
            return
        used.add(name)
        axes[factor] = (*axes[factor], name)


def legal(rule: OpRule, axes: FactorAxes, mesh: LogicalMesh) -> FactorAxes:
    """Drops axes from minor factors whose major neighbours in some dimension are not completely split."""
    compound = [factors for side in (rule.operands, rule.results) for dims in side for factors in dims if len(factors) > 1]
    if not compound or not any(axes):
        return axes
    cut = list(axes)
    changed = True
    while changed:
        changed = False
        for factors in compound:
            complete = True
            for factor in factors:
                if not complete and cut[factor]:
                    cut[factor], changed = (), True
                complete = complete and mesh.num_slices(cut[factor]) == rule.sizes[factor]
    return tuple(cut)


def project(dims: Sequence[DimFactors], axes: FactorAxes) -> TensorSharding:
    """Returns the sharding of one tensor of an op whose factors are split along `axes`."""
    return tuple(
        axes[factors[0]] if len(factors) == 1 else tuple(name for factor in factors for name in axes[factor]) if factors else ()
        for factors in dims
    )


def partial_axes(rule: OpRule, axes: FactorAxes) -> AxisNames:
    """Returns the axes over which the op's results are unreduced."""
    return tuple(name for kind, own in zip(rule.kinds, axes, strict=True) if own and kind.value == "reduction" for name in own)


def joined(base: TensorSharding, offered: TensorSharding, shape: tuple[int, ...], mesh: LogicalMesh) -> TensorSharding:
    """Returns `base` with the axes that `offered` has behind its own, as far as the dimension divides; no axis is used twice."""
    if base == offered:
        return base
    used = {name for dim in base for name in dim}
    dims = []
    for own, new, size in zip(base, offered, shape, strict=True):
        dim = own
        if len(new) > len(own) and new[: len(own)] == own:
            slices = mesh.num_slices(own)
            for name in new[len(own) :]:
                slices *= mesh.sizes[name]
                if name in used or size % slices:
                    break
                used.add(name)
                dim = (*dim, name)
        dims.append(dim)
    return tuple(dims)


class Taken(NamedTuple):
    """The shardings in which an op takes its operands, and makes its results."""

    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]


class Splits:
    """The shardings in which the ops of an assignment take operands and make results.

    Ops of the same rule that are split alike share them, so they are computed once.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._of = assignment.ops
        self._known: dict[tuple[int, int], Taken] = {}

    def taken(self, op: Op) -> Taken:
        """Returns the shardings of one op of the assignment's graph."""
        rule, split = op.rule, self._of[op.id]
        key = (id(rule), id(split))
        found = self._known.get(key)
        if found is None:
            axes = split.axes
            sides = (tuple([project(dims, axes) for dims in side]) for side in (rule.operands, rule.results))
            found = self._known[key] = Taken(*sides)
        return found


def local_bytes(value: Value, sharding: TensorSharding, mesh: LogicalMesh) -> int:
    """Returns the bytes of one device's block of a value."""
    count = item_bytes(value.dtype)
    for size in local_shape(value.shape, sharding, mesh):
        count *= size
    return count
