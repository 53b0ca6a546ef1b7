"""Rules of dot products: batch and free dimensions pass through, contracted dimensions reduce."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spmdctx.ir import DimFactors, FactorKind, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape
from spmdctx.rules.registry import rule

Pairs = Iterable[tuple[int, int]]


@rule("dot_general", "scaled_dot")
def dot_general(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """`[batch, free_l, free_r]` from the two operands; scales of a scaled dot follow where they have the operand's size."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    lhs, rhs = operands[:2]
    builder = RuleBuilder()
    batch = list(zip(lhs_batch, rhs_batch, strict=True))
    lhs_dims, rhs_dims = _dot_dims(builder, lhs, rhs, batch, zip(lhs_contracting, rhs_contracting, strict=True))
    lhs_free, rhs_free = _free(lhs, lhs_batch, lhs_contracting), _free(rhs, rhs_batch, rhs_contracting)
    result = [lhs_dims[dim] for dim in (*lhs_batch, *lhs_free)] + [rhs_dims[dim] for dim in rhs_free]
    scales = [_scale(dims, shape, scale) for dims, shape, scale in zip((lhs_dims, rhs_dims), (lhs, rhs), operands[2:], strict=False)]
    return builder.build([lhs_dims, rhs_dims, *scales], [result])


@rule("ragged_dot_general")
def ragged_dot_general(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """A dot whose ragged dimension is cut into groups; the group dimension leads the right operand or the result.

    XLA masks the rows of each group, so the ragged dimension splits like any other; the groups stay whole, which it would gather.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    lhs, rhs, *others = operands
    groups = tuple(numbers.rhs_group_dimensions)
    builder = RuleBuilder()
    lhs_dims, rhs_dims = _dot_dims(
        builder,
        lhs,
        rhs,
        list(zip(lhs_batch, rhs_batch, strict=True)),
        zip(lhs_contracting, rhs_contracting, strict=True),
        whole_rhs=frozenset(groups),
    )
    lhs_free, rhs_free = _free(lhs, lhs_batch, lhs_contracting), _free(rhs, rhs_batch, (*rhs_contracting, *groups))
    result = [lhs_dims[dim] for dim in (*lhs_batch, *lhs_free)] + [rhs_dims[dim] for dim in rhs_free]
    if set(numbers.lhs_ragged_dimensions) & set(lhs_contracting):
        result.insert(0, builder.factor(results[0][0], blocked=True))
    return builder.build([lhs_dims, rhs_dims, *(((),) * len(shape) for shape in others)], [result])


def _dot_dims(
    builder: RuleBuilder,
    lhs: Shape,
    rhs: Shape,
    batch: Pairs,
    contracting: Pairs,
    whole_rhs: frozenset[int] = frozenset(),
) -> tuple[list[DimFactors], list[DimFactors]]:
    lhs_dims: dict[int, DimFactors] = {}
    rhs_dims: dict[int, DimFactors] = {}
    for pairs, kind in ((batch, FactorKind.PASS_THROUGH), (contracting, FactorKind.REDUCTION)):
        for left, right in pairs:
            lhs_dims[left] = rhs_dims[right] = builder.factor(lhs[left], kind)
    for dims, shape, whole in ((lhs_dims, lhs, frozenset[int]()), (rhs_dims, rhs, whole_rhs)):
        for dim, size in enumerate(shape):
            if dim not in dims:
                dims[dim] = builder.factor(size, blocked=dim in whole)
    return [lhs_dims[dim] for dim in range(len(lhs))], [rhs_dims[dim] for dim in range(len(rhs))]


def _free(shape: Shape, *taken: Sequence[int]) -> list[int]:
    used = {dim for dims in taken for dim in dims}
    return [dim for dim in range(len(shape)) if dim not in used]


def _scale(dims: list[DimFactors], shape: Shape, scale: Shape) -> list[DimFactors]:
    return [factors if own == size else () for factors, own, size in zip(dims, shape, scale, strict=True)]
