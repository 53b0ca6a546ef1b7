"""Rules of primitives that order or accumulate along one dimension, which stays whole; the others pass through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdctx.ir.rule import DimFactors, FactorKind, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape
from spmdctx.rules.registry import rule


@rule("sort")
def sort(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Sorts operands, keys and values alike, that all have one shape."""
    return _along(operands, params["dimension"], FactorKind.NEED_REPLICATION)


@rule("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp")
def cumulate(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Computes running totals."""
    return _along(operands, params["axis"], FactorKind.PERMUTATION)


def _along(operands: tuple[Shape, ...], axis: int, kind: FactorKind) -> OpRule:
    builder = RuleBuilder()
    dims = _dims(builder, operands[0], axis, kind)
    return builder.build([dims] * len(operands), [dims] * len(operands))


@rule("top_k")
def top_k(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Selects the largest k values and their indices."""
    return _select(operands[0], params["axis"], params["k"])


@rule("approx_top_k")
def approx_top_k(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Selects as `top_k` does; the shape of the result says how many candidates it keeps."""
    axis = params["reduction_dimension"] % len(operands[0])
    return _select(operands[0], axis, results[0][axis])


def _select(operand: Shape, axis: int, kept: int) -> OpRule:
    builder = RuleBuilder()
    dims = _dims(builder, operand, axis, FactorKind.NEED_REPLICATION)
    selected: list[DimFactors] = list(dims)
    if kept != operand[axis]:
        selected[axis] = ()
    return builder.build([dims], [selected] * 2)


def _dims(builder: RuleBuilder, shape: Shape, axis: int, kind: FactorKind) -> list[DimFactors]:
    return [builder.factor(size, kind if dim == axis else FactorKind.PASS_THROUGH) for dim, size in enumerate(shape)]
