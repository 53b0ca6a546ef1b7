"""What rounding does to each primitive: nothing, an error in its result, or errors in the terms that it sums."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from spmdctx.ir.primitives import IDENTITIES, LAYOUT, LOSS

EXACT = frozenset(
    {
        *LAYOUT,
        *("broadcast_in_dim", "slice", "dynamic_slice", "dynamic_update_slice", "gather", "concatenate", "pad", "rev"),
        *("select_n", "max", "min", "clamp", "neg", "abs", "sign", "floor", "ceil", "round", "stop_gradient", "optimization_barrier"),
        *("reduce_max", "reduce_min", "cummax", "cummin", "sort", "top_k", "scatter", "scatter-max", "scatter-min"),
        *("reduce_window_max", "reduce_window_min", "select_and_gather_add", "argmax", "argmin", "reduce_and", "reduce_or"),
        *("real", "imag", "complex", "conj", "device_put", "split", "tile", "iota", "bitcast_convert_type", "nextafter"),
        *("pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant", "all_to_all", "pvary", "pbroadcast", "axis_index"),
        *("random_bits", "random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_split", "threefry2x32"),
        *("is_finite", "empty", LOSS),
    }
)
"""Primitives whose results are operands, or exact functions of them."""

SUMMING = frozenset(
    {
        *("dot_general", "conv_general_dilated", "ragged_dot_general", "reduce_sum", "cumsum", "cumlogsumexp"),
        *("scatter-add", "scatter-sub", "scatter-mul"),
        *("reduce_prod", "cumprod", "reduce_window_sum", "reduce_window", "select_and_scatter_add"),
        *("psum", "psum_invariant", "reduce_scatter", "reduce", "fft", "cholesky", "triangular_solve"),
        *("eigh", "eig", "svd", "lu", "qr", "geqrf", "householder_product", "custom_partitioning"),
    }
)
"""Primitives that add up terms: another order, or other rounding of the terms, changes a sum even where the terms cancel."""

WIDENED = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "reduce_window_sum", "psum", "psum_invariant"})
"""Sums that a compiler may add up in a higher precision than that of their terms."""

PRODUCTS = frozenset({"mul", "div", "sqrt", "rsqrt", "square", "integer_pow", "cbrt"})
"""Primitives of one or two operands whose relative error is that of their operands, and one rounding more."""

ADDING = frozenset({"add", "sub", "add_any"})
"""Primitives that add two operands."""

REPORTS = frozenset({"debug_callback", "debug_print", "io_callback"})
"""Callbacks; those without results only report to the host."""

_ADDED_IN_BLOCKS = 64
"""Terms that are taken to be added up without more rounding error than one rounding of each makes."""


def is_float(value: Any) -> bool:
    """Returns whether a value or variable holds floating or complex numbers."""
    return jnp.issubdtype(getattr(value, "dtype", jnp.int32), jnp.inexact)


def is_exact(eqn: Any) -> bool:
    """Returns whether an equation rounds nothing."""
    name = eqn.primitive.name
    if name in EXACT or name in IDENTITIES:
        return True
    if name == "convert_element_type":
        before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        # Compilers keep bfloat16 and float16 wider than written, but not the types that need scales.
        return not (jnp.issubdtype(before, jnp.inexact) and 2 <= after.itemsize < before.itemsize)
    return name == "add" and any(_is_zero(atom) for atom in eqn.invars)


def widens(eqn: Any) -> bool:
    """Returns whether an equation adds up terms of low precision that could be added up in float32."""
    return eqn.primitive.name in WIDENED and all(atom.aval.dtype in (jnp.bfloat16, jnp.float16) for atom in eqn.invars)


def amplification(eqn: Any) -> float:
    """Returns how many times the rounding of one term the error of a long sum amounts to, for each term."""
    return max(1.0, math.sqrt(_num_terms(eqn) / _ADDED_IN_BLOCKS))


def _num_terms(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    shape: tuple[int, ...] = tuple(getattr(eqn.invars[0].aval, "shape", ()))
    if name == "dot_general":
        return math.prod(shape[dim] for dim in params["dimension_numbers"][0][0])
    if name == "conv_general_dilated":
        kernel: tuple[int, ...] = eqn.invars[1].aval.shape
        outputs: int = kernel[params["dimension_numbers"].rhs_spec[0]]
        return math.prod(kernel) // max(outputs, 1)
    if name in ("reduce_sum", "reduce_prod"):
        return math.prod(shape[axis] for axis in params["axes"])
    return shape[params["axis"]] if name in ("cumsum", "cumprod", "cumlogsumexp") else 1


def _is_zero(atom: Any) -> bool:
    value = getattr(atom, "val", None)
    return value is not None and getattr(value, "ndim", 0) == 0 and value == 0
