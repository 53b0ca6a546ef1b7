"""The marker primitive of losses: an identity that tells which values of a traced step enter which call of `value_and_grad`."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from spmdctx.ir.primitives import LOSS

loss_p = Primitive(LOSS)
"""The marker: `loss_p.bind(x, call=, leaf=, mapped=)` is x; `mapped` is the dimension of x that a vmap around the call removes."""


def mark(x: Any, call: int, leaf: int) -> Any:
    """Marks a leaf of a call, both by their numbers."""
    return loss_p.bind(x, call=call, leaf=leaf, mapped=())


def _identity(x: Any, **_: Any) -> Any:
    return x


def _batch(args: tuple[Any], dims: tuple[int], *, mapped: tuple[int, ...], **params: Any) -> tuple[Any, int]:
    return loss_p.bind(args[0], mapped=(*mapped, dims[0]), **params), dims[0]


def _transpose(cotangent: Any, operand: Any, **_: Any) -> list[Any]:
    del operand
    return [cotangent]


loss_p.def_impl(_identity)
loss_p.def_abstract_eval(_identity)
ad.deflinear2(loss_p, _transpose)
batching.primitive_batchers[loss_p] = _batch
mlir.register_lowering(loss_p, lambda ctx, x, **_: [x])
