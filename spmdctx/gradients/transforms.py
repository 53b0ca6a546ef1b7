"""`value_and_grad` and `grad` with the interface of JAX and nnx, which cooperate with the step that is planned around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from spmdctx.gradients.cell import loss_of
from spmdctx.gradients.loss import Loss
from spmdctx.gradients.scope import carrier_of_trace, meet_cell

P = ParamSpec("P")


def value_and_grad(fun: Callable[P, Any], argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable[P, Any]:
    """Works like `jax.value_and_grad`, or like `nnx.value_and_grad` if an argument is an nnx object.

    In a step of semi_auto_parallel or auto_parallel it differentiates the loss over the global batch. In data_parallel and
    hybrid_parallel each device differentiates the loss of its own shard of the batch. Gradients are then summed over the
    devices, or averaged with `gradients_mean`, in float32 with `gradient_fp32_sync`. The loss and floating scalars of aux come
    back as means over the devices. Parts of aux with a batch dimension come back whole, and batch statistics averaged. PRNG keys
    are folded with the device's number. Gradients of split arguments, of layerwise_parallel parameters and of the batch itself
    stay where they are.

    With `grad_accumulation_step` k the loss is differentiated on k micro-batches, one after the other. Micro-batch j holds the
    elements j, j+k, j+2k, ... of the batch. Gradients, loss and floating scalars of aux are means over the micro-batches.
    Variables and batch statistics pass from one to the next. PRNG keys that are arguments are folded with j.

    Args:
        fun: the loss, which may close over arrays of the step.
        argnums: the arguments to differentiate by; nnx also allows `nnx.DiffState`.
        has_aux: whether `fun` returns (loss, aux).
        options: further options of the two functions.
    """
    return _transformed(_loss(fun, "value_and_grad", argnums, has_aux, options))


def grad(fun: Callable[P, Any], argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable[P, Any]:
    """Works like `jax.grad`, or like `nnx.grad` if an argument is an nnx object; see `value_and_grad`."""
    return _transformed(_loss(fun, "grad", argnums, has_aux, options))


def _loss(fun: Callable[..., Any], name: str, argnums: Any, has_aux: bool, options: dict[str, Any]) -> Loss:
    inside = loss_of(fun)
    return Loss(inside.fn, name, argnums, has_aux, options, inside.micro_size, inside.num_parts)


def _transformed(loss: Loss) -> Callable[..., Any]:
    @functools.wraps(loss.fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        meet_cell(loss.micro_size)
        carrier = carrier_of_trace(asks=loss.num_parts > 1)
        return loss.call(args, kwargs) if carrier is None else carrier.run(loss, args, kwargs)

    return differentiated
