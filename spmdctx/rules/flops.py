"""Counts the floating-point operations of an op from its rule and its shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from spmdctx.ir.primitives import CONTRACTIONS, KERNELS
from spmdctx.ir.rule import OpRule, window_flops
from spmdctx.rules.builder import Shape
from spmdctx.rules.kernels.grids import kernel_flops

_Shapes = tuple[Shape, ...]

_WITHOUT_FLOPS = frozenset(
    {
        *("bitcast_convert_type", "broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice", "dynamic_update_slice"),
        *("empty", "empty2", "gather", "iota", "optimization_barrier", "pad", "reshape", "rev", "select_n", "slice", "split"),
        *("squeeze", "stop_gradient", "transpose", "name", "device_put", "sharding_constraint", "shard_alike"),
        "scatter",
    }
)
"""Primitives that move data and compute nothing."""

_READ_ALL = ("reduce", "arg", "cum", "select_and")

# Leading terms of the usual algorithms for an m x n matrix (Golub and Van Loan, Matrix Computations, 4th edition); the
# eigenvalue ones are iterative, and their constants customary estimates.
_MATRIX_FLOPS: dict[str, Callable[[int, int], float]] = {
    "cholesky": lambda m, n: n**3 / 3,
    "cholesky_update": lambda m, n: 2 * n**2,
    "eig": lambda m, n: 25 * n**3,
    "eigh": lambda m, n: 9 * n**3,
    "geqp3": lambda m, n: 2 * m * n * min(m, n),
    "geqrf": lambda m, n: 2 * m * n * min(m, n),
    "hessenberg": lambda m, n: 10 * n**3 / 3,
    "householder_product": lambda m, n: 4 * m * n * min(m, n) / 3,
    "lu": lambda m, n: m * n * min(m, n) * 2 / 3,
    "qr": lambda m, n: 4 * m * n * min(m, n),
    "schur": lambda m, n: 25 * n**3,
    "svd": lambda m, n: 4 * m * n * max(m, n) + 22 * min(m, n) ** 3,
    "symmetric_product": lambda m, n: m * m * n,
    "tridiagonal": lambda m, n: 4 * n**3 / 3,
}


def op_flops(primitive: str, rule: OpRule, operands: _Shapes, results: _Shapes, params: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Returns the operations of the whole op on one device; a multiply-add counts as two, moving data as none.

    Only kernels, which bring a program of their own, and convolutions that put elements apart need the parameters of their equation.
    """
    if primitive in KERNELS:
        return kernel_flops(params)
    if primitive in _WITHOUT_FLOPS:
        return 0
    if primitive in CONTRACTIONS:
        return _contraction_flops(rule)
    if primitive == "conv_general_dilated":
        return window_flops(rule, operands, results) // math.prod(params.get("lhs_dilation") or ())
    if primitive in _MATRIX_FLOPS:
        *batch, m, n = operands[0]
        return int(math.prod(batch) * _MATRIX_FLOPS[primitive](m, n))
    if primitive == "triangular_solve":
        return math.prod(operands[1]) * operands[0][-1]
    if primitive in ("sort", "top_k", "approx_top_k"):
        return int(math.prod(operands[0]) * math.log2(_whole_size(operands[0], rule)))
    if primitive == "fft":
        return int(5 * math.prod(operands[0]) * math.log2(_whole_size(operands[0], rule)))
    if primitive.startswith("scatter"):
        return math.prod(operands[2])
    return _largest(operands if primitive.startswith(_READ_ALL) else results)


def _contraction_flops(rule: OpRule) -> int:
    """Counts two operations per point of the iteration space.

    Each row of a ragged dot meets one group only. Where rows are contracted, compilers multiply all of them for each group.
    """
    lhs, rhs, made = ({factor for factors in dims for factor in factors} for dims in (*rule.operands[:2], rule.results[0]))
    return 2 * math.prod(rule.sizes[factor] for factor in lhs | (rhs - rule.blocked) | made)


def _whole_size(shape: Shape, rule: OpRule) -> int:
    """Returns the number of elements, at least 2, along the dimensions that are sorted or transformed: those that can't be split."""
    splittable = rule.splittable
    dims = zip(shape, rule.operands[0], strict=True)
    return max(2, math.prod(size for size, factors in dims if not any(splittable[factor] for factor in factors)))


def _largest(shapes: _Shapes) -> int:
    return max((math.prod(shape) for shape in shapes), default=0)
