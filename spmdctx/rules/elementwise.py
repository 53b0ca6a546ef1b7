"""Rules of elementwise primitives: every dimension passes through; operands of rank 0 or size 1 broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdctx.ir.rule import OpRule
from spmdctx.rules.builder import RuleBuilder, Shape, broadcast_dims
from spmdctx.rules.registry import rule

UNARY = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clz", "conj"),
    *("convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1"),
    *("floor", "imag", "integer_pow", "is_finite", "lgamma", "log", "log1p", "log2", "logistic", "neg", "not"),
    *("one_minus_square", "population_count", "real", "reduce_precision", "round", "rsqrt", "sign", "sin", "sinh", "sqrt"),
    *("square", "stop_gradient", "tan", "tanh"),
)
BINARY = (
    *("add", "add_any", "and", "atan2", "complex", "div", "eq", "eq_to", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "le"),
    *("le_to", "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "nextafter", "or", "polygamma", "pow", "rem", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sub", "xor", "zeta"),
)
MANY = ("clamp", "polynomial", "regularized_incomplete_beta", "select_n")
ELEMENTWISE = frozenset({*UNARY, *BINARY, *MANY})


@rule(*UNARY, *BINARY, *MANY)
def elementwise(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Gives each dimension of the results, which have one shape, a factor that the operands share."""
    builder = RuleBuilder()
    full = results[0]
    dims = builder.factors(full)
    return builder.build([broadcast_dims(dims, shape, full) for shape in operands], [dims] * len(results))


@rule("optimization_barrier")
def optimization_barrier(operands: tuple[Shape, ...], _results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Lets each operand pass through to its own result."""
    builder = RuleBuilder()
    dims = [builder.factors(shape) for shape in operands]
    return builder.build(dims, dims)


@rule("bitcast_convert_type")
def bitcast_convert_type(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Lets the leading dimensions that both sides share pass through.

    Where the item size changes, the last dimension of the longer side holds the parts of one item, and stays whole.
    """
    (operand,), (result,) = operands, results
    builder = RuleBuilder()
    shared = min(len(operand), len(result))
    dims = builder.factors(operand[:shared])
    return builder.build([dims + _parts(builder, operand[shared:])], [dims + _parts(builder, result[shared:])])


def _parts(builder: RuleBuilder, shape: Shape) -> list[tuple[int, ...]]:
    return builder.factors(shape, blocked=True)
