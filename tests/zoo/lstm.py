"""A recurrent sequence tagger: an LSTM by scan over time."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.zoo.case import BATCH, COLUMN, LEARNING_RATE, Numbers, Split, Step, cross_entropy, linen_program, nnx_program, pure_program

TIME, WIDTH, HIDDEN, CLASSES = 24, 48, 96, 24


def _batch(numbers: Numbers) -> tuple[Any, ...]:
    return numbers.normal(BATCH, TIME, WIDTH), numbers.integers(CLASSES, BATCH, TIME)


def _project(x: Any, w: Any) -> Any:
    """[..., width] by [width, 4, hidden]: the four gates side by side, so that hidden units can be split."""
    return jnp.einsum("...i,igh->...gh", x, w)


def _recur(projected: Any, hidden: Any, w: Any) -> Any:
    return projected + jnp.einsum("bi,igh->bgh", hidden, w)


def make_pytree(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    numbers = Numbers(dtype)
    params = {
        "input": numbers.weight(WIDTH, 4, HIDDEN, fan_in=WIDTH),
        "recurrent": numbers.weight(HIDDEN, 4, HIDDEN, fan_in=HIDDEN),
        "bias": numbers.zeros(4, HIDDEN),
        "head": numbers.weight(HIDDEN, CLASSES),
    }

    def loss(params: Any, x: Any, labels: Any) -> Any:
        def cell(carry: Any, projected: Any) -> Any:
            hidden, memory = carry
            gates = split(_recur, "d-m d- --m", "d-m")(projected, hidden, params["recurrent"]) + params["bias"]
            keep, write, show = (jax.nn.sigmoid(gates[:, index]) for index in range(3))
            memory = keep * memory + write * jnp.tanh(gates[:, 3])
            hidden = show * jnp.tanh(memory)
            return (hidden, memory), hidden

        projected = split(_project, "d-- --m", "d--m", pin="* --m")(x, params["input"])
        zeros = jnp.zeros((x.shape[0], HIDDEN), x.dtype)
        _, outputs = jax.lax.scan(cell, (zeros, zeros), projected.swapaxes(0, 1))
        return cross_entropy(outputs.swapaxes(0, 1) @ params["head"], labels)

    return pure_program(loss, params, _batch(numbers))


class LinenLSTM(nn.Module):
    split: Split
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        inward = self.split.module(nn.Dense(HIDDEN, name="inward", **kwargs), "d--", COLUMN, pin=True)
        x = nn.RNN(nn.OptimizedLSTMCell(HIDDEN, name="cell", **kwargs))(nn.relu(inward(x)))
        return nn.Dense(CLASSES, name="head", **kwargs)(x)


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    batch = _batch(Numbers(dtype))
    model = LinenLSTM(split, dtype)
    params = jax.jit(model.init)(jax.random.key(0), batch[0])["params"]

    def loss(params: Any, state: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, x), labels), {}

    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(LEARNING_RATE))
    return linen_program(loss, state, batch)


class NnxLSTM(nnx.Module):
    def __init__(self, split: Split, dtype: Any) -> None:
        kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        inward = nnx.Linear(WIDTH, HIDDEN, **kwargs)
        self.inward = split.module(inward, "d--", COLUMN, pin=True)
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(HIDDEN, HIDDEN, **kwargs), rngs=nnx.Rngs(1))
        self.head = nnx.Linear(HIDDEN, CLASSES, **kwargs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.rnn(nnx.relu(self.inward(x))))


def make_nnx(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss(model: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(model(x), labels)

    return nnx_program(loss, NnxLSTM(split, dtype), _batch(Numbers(dtype)))
