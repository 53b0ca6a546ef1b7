"""Where the batch goes: which dimension of which value traces back to dimension 0 of a batch leaf."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from spmdctx.ir.graph import Graph, Op
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.primitives import CUTTING, Boundary
from spmdctx.ir.rule import FactorKind
from spmdctx.ir.sharding import AxisNames

_NEEDS_WHOLE = CUTTING | {"rev"}
"""Ops that need the whole of a dimension that they cut, of whose results that dimension can be split anew."""


class BatchDims(NamedTuple):
    """Value id to the dimension whose major factor is the batch, and the same of values that an op can't hand the split on to.

    Those are parts of a batch: of `x.reshape(4, -1)` the dimension of one micro-batch, where a loop takes the four one by one or
    no mesh axis divides them; and the results of slices and concatenations.
    """

    found: dict[int, int]
    parts: dict[int, int]


def batch_dims(graph: Graph, leaves: Iterable[int], mesh: LogicalMesh) -> BatchDims:
    """Follows dimension 0 of the batch leaves through the graph; loop carries are followed until nothing changes."""
    found = {value: 0 for value in leaves if graph.values[value].shape}
    parts: dict[int, int] = {}
    tied: dict[int, list[int]] = {}
    for left, right in graph.ties:
        tied.setdefault(left, []).append(right)
        tied.setdefault(right, []).append(left)
    looped = {op.operands[0] for op in graph.ops if op.boundary is Boundary.ENTER and op.rule.blocked}
    memo: dict[tuple[int, ...], tuple[int | None, ...]] = {}
    # Ops are in execution order, so that only what a tie carries back must be followed once more.
    again = True
    while again:
        again = False
        for op in graph.ops:
            if found.keys().isdisjoint(op.operands):
                continue
            positions = tuple([found.get(value, -1) for value in op.operands])
            key = (id(op.rule), *positions)
            dims = memo.get(key)
            if dims is None:
                dims = memo[key] = _result_dims(op, positions)
            part = _part(op, positions, dims, looped, mesh)
            for value, dim in zip(op.results, dims if part is None else (part,) * len(dims), strict=True):
                if dim is not None and value not in found:
                    found[value] = dim
                    if part is not None:
                        parts[value] = dim
                    for other in tied.get(value, ()):
                        again = again or other not in found
                        found.setdefault(other, dim)
    return BatchDims(found, parts)


def _part(op: Op, positions: tuple[int, ...], dims: tuple[int | None, ...], looped: Set[int], mesh: LogicalMesh) -> int | None:
    """The dimension of the results that a part of the batch has, None where the op hands the whole batch on, or nothing of it."""
    if op.primitive in _NEEDS_WHOLE:
        return next(position for position in positions if position >= 0) if set(dims) == {None} else None
    if op.primitive != "reshape" or dims == (None,):
        return None
    rule, major = op.rule, dims[0]
    assert major is not None
    factors = rule.operands[0][positions[0]]
    if len(factors) == 1 or (op.results[0] not in looped and dividing_axes(rule.sizes[factors[0]], mesh.names, mesh)):
        return None
    return next((index for index, own in enumerate(rule.results[0]) if own[:1] == factors[1:2]), None)


def _result_dims(op: Op, positions: tuple[int, ...]) -> tuple[int | None, ...]:
    """Per result the dimension led by the factor that leads an operand's batch dimension."""
    rule = op.rule
    leaders = {dims[position][0] for dims, position in zip(rule.operands, positions, strict=True) if position >= 0 and dims[position]}
    leaders = {factor for factor in leaders if rule.kinds[factor] is FactorKind.PASS_THROUGH and factor not in rule.blocked}
    return tuple(next((index for index, factors in enumerate(dims) if factors and factors[0] in leaders), None) for dims in rule.results)


def dividing_axes(size: int, axes: AxisNames, mesh: LogicalMesh) -> AxisNames:
    """The longest leading part of `axes` that divides `size`."""
    taken: AxisNames = ()
    for name in axes:
        if size % mesh.num_slices((*taken, name)):
            break
        taken = (*taken, name)
    return taken
