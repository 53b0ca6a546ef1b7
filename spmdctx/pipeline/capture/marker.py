"""The primitive that stands for a loss and its gradients in the trace of a step; a pipeline runs it in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

loss_p = Primitive("spmdctx_pipeline")
"""`loss_p.bind(*leaves, number=, types=)` gives one result for each of `types`; only a pipeline can run it."""

loss_p.multiple_results = True


def stand_in(number: int, leaves: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Returns what a loss gives, as results of one equation.

    Args:
        number: of the loss in its step.
        leaves: what it reads.
        avals: the types of its results.
    """
    return list(loss_p.bind(*leaves, number=number, types=tuple(map(_type, avals))))


def _type(aval: Any) -> tuple[tuple[int, ...], Any, bool]:
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))


def _abstract(*_: Any, types: Sequence[tuple[tuple[int, ...], Any, bool]], **__: Any) -> list[Any]:
    return [jax.typeof(jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)) for shape, dtype, weak in types]


loss_p.def_abstract_eval(_abstract)
