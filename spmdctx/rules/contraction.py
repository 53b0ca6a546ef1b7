"""Rules of dot products: batch and free dimensions pass through, contracted dimensions reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spmdctx.ir.rule import DimFactors, FactorKind, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape
from spmdctx.rules.registry import rule

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as JAX writes them."""


class _Dot(NamedTuple):
    lhs: list[DimFactors]
    rhs: list[DimFactors]
    result: list[DimFactors]


@rule("dot_general")
def dot_general(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Multiplies two operands into `[batch, lhs free, rhs free]`."""
    builder = RuleBuilder()
    dot = _dot(builder, operands[0], operands[1], params["dimension_numbers"])
    return builder.build([dot.lhs, dot.rhs], [dot.result])


@rule("scaled_dot")
def scaled_dot(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Multiplies operands that have a scale each, with one element per block of the contracted dimension; only whole blocks split."""
    lhs, rhs, lhs_scale, rhs_scale = operands
    (lhs_contracting, rhs_contracting), _ = params["dimension_numbers"]
    blocks = [max(lhs_scale[left], rhs_scale[right]) for left, right in zip(lhs_contracting, rhs_contracting, strict=True)]
    lhs_blocks, rhs_blocks = _resize(lhs, lhs_contracting, blocks), _resize(rhs, rhs_contracting, blocks)
    builder = RuleBuilder()
    dot = _dot(builder, lhs_blocks, rhs_blocks, params["dimension_numbers"])
    scales = [_scale_dims(dot.lhs, lhs_blocks, lhs_scale), _scale_dims(dot.rhs, rhs_blocks, rhs_scale)]
    for left, right, count in zip(lhs_contracting, rhs_contracting, blocks, strict=True):
        within = builder.factor(lhs[left] // count, FactorKind.REDUCTION, blocked=True)
        dot.lhs[left] += within
        dot.rhs[right] += within
    return builder.build([dot.lhs, dot.rhs, *scales], [dot.result])


@rule("ragged_dot_general")
def ragged_dot_general(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Multiplies operands whose ragged dimension is cut into groups; the group dimension leads the right operand or the result.

    XLA masks the rows of each group, so the ragged dimension splits like any other. XLA would gather the groups, so they stay whole.
    Sizes that differ along dimensions before the ragged one split with these.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    lhs, rhs, *sizes = operands
    builder = RuleBuilder()
    dot = _dot(builder, lhs, rhs, numbers.dot_dimension_numbers, groups=tuple(numbers.rhs_group_dimensions))
    (lhs_contracting, _), _ = numbers.dot_dimension_numbers
    if set(numbers.lhs_ragged_dimensions) & set(lhs_contracting):
        dot.result.insert(0, builder.factor(results[0][0], blocked=True))
    before = [dot.lhs[dim] for dim in _before_ragged(len(lhs), numbers)]
    return builder.build([dot.lhs, dot.rhs, *([*before, ()] if len(shape) > 1 else [()] for shape in sizes)], [dot.result])


def _before_ragged(rank: int, numbers: Any) -> list[int]:
    """Dimensions of the left operand, for each place of which groups may have other sizes, in the order of the sizes' own."""
    (contracting, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    if ragged in batch:
        return list(batch[: batch.index(ragged)])
    kind = contracting if ragged in contracting else [dim for dim in range(rank) if dim not in (*contracting, *batch)]
    return [*batch, *kind[: list(kind).index(ragged)]]


def _dot(builder: RuleBuilder, lhs: Shape, rhs: Shape, numbers: Numbers, groups: Sequence[int] = ()) -> _Dot:
    """Returns the factors of both operands and the result; `groups` are dimensions of the right operand that the result lacks."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers
    lhs_dims: list[DimFactors] = [()] * len(lhs)
    rhs_dims: list[DimFactors] = [()] * len(rhs)
    for left, right in zip(lhs_batch, rhs_batch, strict=True):
        lhs_dims[left] = rhs_dims[right] = builder.factor(lhs[left])
    for left, right in zip(lhs_contracting, rhs_contracting, strict=True):
        lhs_dims[left] = rhs_dims[right] = builder.factor(lhs[left], FactorKind.REDUCTION)
    result = [lhs_dims[dim] for dim in lhs_batch]
    for dims, shape, taken in ((lhs_dims, lhs, {*lhs_batch, *lhs_contracting}), (rhs_dims, rhs, {*rhs_batch, *rhs_contracting, *groups})):
        for dim in (dim for dim in range(len(shape)) if dim not in taken):
            dims[dim] = builder.factor(shape[dim])
            result.append(dims[dim])
    for dim in groups:
        rhs_dims[dim] = builder.factor(rhs[dim], blocked=True)
    return _Dot(lhs_dims, rhs_dims, result)


def _resize(shape: Shape, dims: Sequence[int], sizes: Sequence[int]) -> Shape:
    changed = dict(zip(dims, sizes, strict=True))
    return tuple(changed.get(dim, size) for dim, size in enumerate(shape))


def _scale_dims(dims: list[DimFactors], shape: Shape, scale: Shape) -> list[DimFactors]:
    return [factors if own == size else () for factors, own, size in zip(dims, shape, scale, strict=True)]
