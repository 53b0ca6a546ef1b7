"""Follows the batch through a graph: the dimensions of values that trace back to dimension 0 of a batch leaf."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from spmdctx.ir.graph import Graph, Op
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.primitives import CUTTING, Boundary
from spmdctx.ir.rule import FactorKind
from spmdctx.ir.sharding import AxisNames

_NEEDS_WHOLE = CUTTING | {"rev"}
"""Ops that need a dimension whole because they cut it; in their results that dimension can be split again."""


class BatchDims(NamedTuple):
    """The batch dimensions of values by id.

    `found` has every dimension whose major factor is the batch. `parts` has those of them that hold a part of a batch, because the
    op that makes the value cannot hand the split on. Results of slices and concatenations are such parts. So is the dimension of
    one micro-batch in `x.reshape(4, -1)`, where a loop takes the four one by one or no mesh axis divides them.
    """

    found: dict[int, int]
    parts: dict[int, int]


def batch_dims(graph: Graph, leaves: Iterable[int], mesh: LogicalMesh) -> BatchDims:
    """Follows dimension 0 of the batch leaves through the graph, and through loop carries until nothing changes."""
    found = {value: 0 for value in leaves if graph.values[value].shape}
    parts: dict[int, int] = {}
    tied: dict[int, list[int]] = {}
    for left, right in graph.ties:
        tied.setdefault(left, []).append(right)
        tied.setdefault(right, []).append(left)
    looped = {op.operands[0] for op in graph.ops if op.boundary is Boundary.ENTER and op.rule.blocked}
    memo: dict[tuple[int, ...], tuple[int | None, ...]] = {}
    # Ops are in execution order: only a dimension that a tie carries back must be followed once more.
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
    """Returns the dimension of the results that holds a part of the batch, None if the op hands on the whole batch, or nothing of it."""
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
    """Returns for each result the dimension whose first factor leads the batch dimension of an operand."""
    rule = op.rule
    leaders = {dims[position][0] for dims, position in zip(rule.operands, positions, strict=True) if position >= 0 and dims[position]}
    leaders = {factor for factor in leaders if rule.kinds[factor] is FactorKind.PASS_THROUGH and factor not in rule.blocked}
    return tuple(next((index for index, factors in enumerate(dims) if factors and factors[0] in leaders), None) for dims in rule.results)


def dividing_axes(size: int, axes: AxisNames, mesh: LogicalMesh) -> AxisNames:
    """Returns the longest leading part of `axes` that divides `size`."""
    taken: AxisNames = ()
    for name in axes:
        if size % mesh.num_slices((*taken, name)):
            break
        taken = (*taken, name)
    return taken
