"""Rules of matrix decompositions, solvers and FFTs: batch dimensions pass through, matrix dimensions stay whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from spmdctx.ir.rule import DimFactors, FactorKind, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape
from spmdctx.rules.registry import rule

_MATRIX = 2

_DECOMPOSITIONS = (
    *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "ormqr"),
    *("qr", "schur", "svd", "symmetric_product", "tridiagonal"),
)


def _decomposition(name: str, operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Takes the leading dimensions of the first operand for the batch of every operand and result."""
    builder = RuleBuilder()
    num_batch = len(operands[0]) - _MATRIX
    batch = builder.factors(operands[0][:num_batch])
    reason = "" if any(batch) else f"the matrix dimensions of {name} depend on each other"
    return builder.build(
        [_after_batch(batch, shape) for shape in operands],
        [_after_batch(batch, shape) for shape in results],
        reason=reason,
    )


for _name in _DECOMPOSITIONS:
    rule(_name)(partial(_decomposition, _name))


@rule("lu_pivots_to_permutation")
def lu_pivots_to_permutation(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Turns `[batch, pivots]` into `[batch, size]`."""
    builder = RuleBuilder()
    batch = builder.factors(operands[0][:-1])
    reason = "" if any(batch) else "a pivot depends on the ones before it"
    return builder.build([_after_batch(batch, operands[0])], [_after_batch(batch, results[0])], reason=reason)


@rule("triangular_solve")
def triangular_solve(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Lets batch dimensions pass through; keeps the matrix and its right-hand sides whole, as Shardy's rule does."""
    builder = RuleBuilder()
    matrix, sides = operands
    batch = builder.factors(matrix[:-_MATRIX])
    rows, columns = (builder.factor(size, FactorKind.NEED_REPLICATION) for size in sides[-_MATRIX:])
    order = rows if params["left_side"] else columns
    reason = "" if any(batch) else "each unknown of a triangular solve depends on the ones before it"
    return builder.build([[*batch, order, order], [*batch, rows, columns]], [[*batch, rows, columns]], reason=reason)


@rule("tridiagonal_solve")
def tridiagonal_solve(operands: tuple[Shape, ...], _results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Solves for three diagonals `[batch, order]` and right-hand sides `[batch, order, free]`; only the batch splits."""
    builder = RuleBuilder()
    *diagonals, sides = operands
    batch = builder.factors(sides[:-_MATRIX])
    order, free = (builder.factor(size, FactorKind.NEED_REPLICATION) for size in sides[-_MATRIX:])
    solved = [*batch, order, free]
    reason = "" if any(batch) else "each unknown of a tridiagonal solve depends on its neighbours"
    return builder.build([[*batch, order]] * len(diagonals) + [solved], [solved], reason=reason)


@rule("fft")
def fft(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Keeps the last dimensions, which are transformed, whole."""
    builder = RuleBuilder()
    (operand,), (result,) = operands, results
    num_batch = len(operand) - len(params["fft_lengths"])
    batch = builder.factors(operand[:num_batch])
    dims, result_dims = list(batch), list(batch)
    for size, out in zip(operand[num_batch:], result[num_batch:], strict=True):
        factors = builder.factor(size, FactorKind.NEED_REPLICATION) if size == out else ()
        dims.append(factors)
        result_dims.append(factors)
    reason = "" if any(batch) else "every element of a transform depends on all others"
    return builder.build([dims], [result_dims], reason=reason)


def _after_batch(batch: list[DimFactors], shape: Shape) -> list[DimFactors]:
    return batch + [()] * (len(shape) - len(batch))
