"""Training steps of the decoder, on nnx objects and as a pure function of their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spmdctx.gradients import value_and_grad
from spmdctx.models.config import DecoderConfig
from spmdctx.models.decoder import Decoder
from spmdctx.models.hand_strategies import UNSPLIT, Split


class Batch(TypedDict):
    """Tokens [batch, seq] and the tokens that follow them."""

    inputs: Any
    targets: Any


def loss_fn(model: Decoder, batch: Batch) -> jax.Array:
    """Returns the mean cross entropy of the next token."""
    logits = model(batch["inputs"])
    loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    return loss


def train_step(model: Decoder, optimizer: nnx.Optimizer[Decoder], batch: Batch) -> jax.Array:
    """Runs one AdamW step in place on the parameters that the optimizer holds; returns the loss."""
    loss: jax.Array
    loss, grads = value_and_grad(loss_fn, argnums=nnx.DiffState(0, optimizer.wrt))(model, batch)
    optimizer.update(model, grads)
    return loss


def create(
    config: DecoderConfig, *, seed: int = 0, split: Split = UNSPLIT, learning_rate: float = 3e-4
) -> tuple[Decoder, nnx.Optimizer[Decoder]]:
    """Makes a new model and its optimizer, which holds only the low-rank updates if there are any."""
    model = Decoder(config, nnx.Rngs(seed), split)
    return model, nnx.Optimizer(model, optax.adamw(learning_rate), wrt=nnx.LoRAParam if config.lora else nnx.Param)


def abstract_batch(batch_size: int, seq: int) -> Batch:
    """Returns the shapes of a batch."""
    tokens = jax.ShapeDtypeStruct((batch_size, seq), jnp.int32)
    return {"inputs": tokens, "targets": tokens}


def abstract_program(
    config: DecoderConfig, batch_size: int, seq: int | None = None, *, split: Split = UNSPLIT
) -> tuple[Callable[..., Any], tuple[Decoder, nnx.Optimizer[Decoder], Batch]]:
    """Returns the training step and its arguments as shapes, which is all that planning a model of any size needs."""
    model, optimizer = nnx.eval_shape(lambda: create(config, split=split))
    return train_step, (model, optimizer, abstract_batch(batch_size, seq or config.max_seq))


def pure_step(model: Decoder, optimizer: nnx.Optimizer[Decoder]) -> tuple[Callable[[Any, Batch], tuple[Any, jax.Array]], Any]:
    """Returns the same step as a function of the state: `(step, state)` with `step(state, batch) -> (state, loss)`."""
    graph, state = nnx.split((model, optimizer))

    def step(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        merged_model, merged_optimizer = nnx.merge(graph, state)
        loss = train_step(merged_model, merged_optimizer, batch)
        return nnx.state((merged_model, merged_optimizer)), loss

    return step, state
