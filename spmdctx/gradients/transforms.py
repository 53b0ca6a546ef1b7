"""`value_and_grad` and `grad` as JAX's and nnx's, known to the step that is planned around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spmdctx.gradients.loss import Loss
from spmdctx.gradients.scope import carrier_of_trace


def value_and_grad(fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """As `jax.value_and_grad`, or as `nnx.value_and_grad` where an argument is an nnx object.

    In a step of semi_auto_parallel or auto_parallel the gradient is that of the loss over the global batch. In data_parallel
    and hybrid_parallel each device differentiates the loss of its own shard of the batch, and gradients are summed over the
    devices, or averaged with `gradients_mean`, in float32 with `gradient_fp32_sync`. There the loss and floating scalars of
    aux come back as means over the devices, aux with the batch as a dimension whole, batch statistics averaged; PRNG keys
    are folded with the device's number. Gradients of arguments that are split, of layerwise_parallel parameters and of the
    batch itself, stay where they are.

    With `grad_accumulation_step` k the loss is differentiated on k micro-batches one after the other, of which number j
    holds the elements j, j+k, j+2k, ... of the batch; gradients, loss and floating scalars of aux are means over them, and
    variables and batch statistics go from one to the next. PRNG keys that are arguments are folded with j.

    Args:
        fun: the loss, which may close over arrays of the step.
        argnums: the arguments to differentiate by; of nnx, `nnx.DiffState` too.
        has_aux: whether `fun` gives (loss, aux).
        options: further options of the two functions.
    """
    return _transformed(Loss(fun, "value_and_grad", argnums, has_aux, options))


def grad(fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """As `jax.grad`, or as `nnx.grad` where an argument is an nnx object; see `value_and_grad`."""
    return _transformed(Loss(fun, "grad", argnums, has_aux, options))


def _transformed(loss: Loss) -> Callable[..., Any]:
    @functools.wraps(loss.fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        carrier = carrier_of_trace()
        return loss.call(args, kwargs) if carrier is None else carrier.run(loss, args, kwargs)

    return differentiated
