"""Widens sums of low-precision gradients to float32: the equations that make partial results, and those that only pass them on.

Devices then reduce float32. The sum is cast back where it is first used for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from spmdctx.ir.primitives import ADDITIONS, REARRANGED
from spmdctx.trace.build.jaxprs.equations import struct_of, structs_of

_BY_RESULT = frozenset({"dot_general", "conv_general_dilated"})
"""Primitives that multiply low-precision operands and say in which type they add up."""

_WIDENS_FIRST = {"cpu": frozenset({"dot_general"})}
"""Primitives whose operands each platform needs in float32: XLA's CPU runtime has no kernel for some products of bfloat16 into float32."""

_ROUNDS = {"gpu": frozenset({"conv_general_dilated"})}
"""Primitives whose result each platform rounds before devices add up: cuDNN has no convolution of bfloat16 into float32.

XLA would convert the operands, and leave the matrix units of bfloat16 unused.
"""

PASSED_ON = ADDITIONS | REARRANGED | {"neg", "convert_element_type"}
"""Primitives that pass sums on as they are, also in float32 where the program has low precision."""


def wide(eqn: Any, operands: Sequence[Any], platform: str) -> list[Any]:
    """Returns equations that compute in float32 what `eqn` computes of `operands` in low precision; the last makes the result.

    `platform` is the one of the devices, as JAX names it.
    """
    written, taken = [], []
    for atom in operands:
        if _takes_low(eqn, platform) or not _is_low(atom.aval.dtype):
            taken.append(atom)
            continue
        written.append(cast(atom, jnp.float32, eqn.source_info))
        taken.append(written[-1].outvars[0])
    return [*written, _bound(eqn, _wide_params(eqn), taken)]


def computing(eqn: Any) -> Callable[..., Any]:
    """Returns a function of arrays that computes `eqn`."""
    return partial(eqn.primitive.bind, **eqn.params)


def computing_wide(eqn: Any, platform: str) -> Callable[..., Any]:
    """Returns a function of arrays that computes `eqn` in float32, like the equations of `wide`; one that rounds is cast behind."""
    if rounds(eqn, platform):
        rounded = computing(eqn)
        return lambda *operands: rounded(*operands).astype(jnp.float32)
    bind = _binder(eqn, _wide_params(eqn))
    keeps = _takes_low(eqn, platform)

    def compute(*operands: Any) -> Any:
        return bind(*[one.astype(jnp.float32) if not keeps and _is_low(one.dtype) else one for one in operands])

    return compute


def _takes_low(eqn: Any, platform: str) -> bool:
    """Returns whether an equation adds up in float32 of operands that stay in low precision."""
    name = eqn.primitive.name
    return name in _BY_RESULT and name not in _WIDENS_FIRST.get(platform, ())


def rounds(eqn: Any, platform: str) -> bool:
    """Returns whether an equation hands out low precision on a platform, so that devices must widen it before they add up."""
    return eqn.primitive.name in _ROUNDS.get(platform, ())


def _is_low(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float32


def _wide_params(eqn: Any) -> dict[str, Any]:
    asked = {"preferred_element_type": jnp.dtype(jnp.float32)} if eqn.primitive.name in _BY_RESULT else {}
    return {**eqn.params, **asked}


def passed_on(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns `eqn` on operands that are now float32; nothing for a cast to float32 or less, which readers of the result make."""
    if eqn.primitive.name != "convert_element_type":
        return [_bound(eqn, dict(eqn.params), operands)]
    dtype = jnp.dtype(eqn.params["new_dtype"])
    wider = dtype.itemsize > 4 or not jnp.issubdtype(dtype, jnp.floating)
    return [cast(operands[0], dtype, eqn.source_info)] if wider else []


def cast(atom: Any, dtype: Any, source_info: Any) -> Any:
    """Returns an equation that casts."""
    template = jax.make_jaxpr(lambda x: jax.lax.convert_element_type(x, dtype))(struct_of(atom.aval)).jaxpr.eqns[0]
    return template.replace(invars=[atom], outvars=[jexc.Var(template.outvars[0].aval)], source_info=source_info)


def _bound(eqn: Any, params: dict[str, Any], operands: Sequence[Any]) -> Any:
    """Returns the primitive bound anew, so that its result has the type that it makes now."""
    bind = _binder(eqn, params)
    template = jax.make_jaxpr(bind)(*structs_of(operands)).jaxpr.eqns[-1]
    fresh = [jexc.Var(var.aval) for var in template.outvars]
    return template.replace(invars=list(operands), outvars=fresh, source_info=eqn.source_info)


def _binder(eqn: Any, params: dict[str, Any]) -> Callable[..., Any]:
    """Returns the primitive on operands of any type."""
    if eqn.primitive.name == "scatter-add":
        # Its parameters hold the addition itself, as a function of the old type.
        kept = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return partial(jax.lax.scatter_add, **{name: params[name] for name in kept})
    return partial(eqn.primitive.bind, **params)
