"""`value_and_grad` and `grad` as JAX's and nnx's, known to the step that is planned around them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from spmdctx.context import current_context
from spmdctx.errors import ContextWarning
from spmdctx.sharding_marks import traced_mode
from spmdctx.trace.objects import has_objects


def value_and_grad(fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """As `jax.value_and_grad`, or as `nnx.value_and_grad` where an argument is an nnx object.

    The gradient is that of the loss over the global batch, which is what `gradients_mean=True` asks for.

    Args:
        fun: the loss.
        argnums: the arguments to differentiate by; of nnx, `nnx.DiffState` too.
        has_aux: whether `fun` gives (loss, aux).
        options: further options of the two functions.
    """
    return _transformed(fun, "value_and_grad", argnums, has_aux, options)


def grad(fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """As `jax.grad`, or as `nnx.grad` where an argument is an nnx object; see `value_and_grad`."""
    return _transformed(fun, "grad", argnums, has_aux, options)


def _transformed(fun: Callable[..., Any], name: str, argnums: Any, has_aux: bool, options: dict[str, Any]) -> Callable[..., Any]:
    pure = None if _is_of_nnx(argnums) else getattr(jax, name)(fun, argnums=argnums, has_aux=has_aux, **options)

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        _warn_of_sum()
        if pure is None or has_objects((args, kwargs)):
            return getattr(nnx, name)(fun, argnums=argnums, has_aux=has_aux, **options)(*args, **kwargs)
        return pure(*args, **kwargs)

    return differentiated


def _is_of_nnx(argnums: Any) -> bool:
    entries = argnums if isinstance(argnums, tuple | list) else (argnums,)
    return not all(isinstance(entry, int) for entry in entries)


def _warn_of_sum() -> None:
    """data_parallel asks for the sum over replicas where gradients_mean is False; what comes is the mean."""
    if traced_mode() == "data_parallel" and not current_context().gradients_mean:
        warnings.warn(
            "gradients_mean=False has no effect: it is not built yet; the gradient is that of the mean loss over the global batch.",
            ContextWarning,
            stacklevel=3,
        )
