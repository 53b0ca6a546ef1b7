"""A three-layer perceptron: column-, row- and column-parallel."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.zoo.case import COLUMN, LEARNING_RATE, ROW, Numbers, Split, Step, cross_entropy, linen_program, nnx_program, pure_program

BATCH, WIDTH, HIDDEN, CLASSES = 192, 48, 96, 24


def _batch(numbers: Numbers) -> tuple[Any, ...]:
    return numbers.normal(BATCH, WIDTH), numbers.integers(CLASSES, BATCH)


def _dense(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x @ w + b)


def _contract(x: Any, w: Any) -> Any:
    return x @ w


def make_pytree(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    numbers = Numbers(dtype)
    params = {
        "up": {"w": numbers.weight(WIDTH, HIDDEN), "b": numbers.zeros(HIDDEN)},
        "down": {"w": numbers.weight(HIDDEN, WIDTH), "b": numbers.zeros(WIDTH)},
        "head": {"w": numbers.weight(WIDTH, CLASSES), "b": numbers.zeros(CLASSES)},
    }

    def loss(params: Any, x: Any, labels: Any) -> Any:
        up, down, head = params["up"], params["down"], params["head"]
        hidden = split(_dense, "d- -m m", "dm", pin="* -m *")(x, up["w"], up["b"])
        x = x + split(_contract, "dm m-", "d-")(hidden, down["w"]) + down["b"]
        logits = split(_contract, "d- -m", "dm", pin="* -m")(x, head["w"]) + head["b"]
        return cross_entropy(logits, labels)

    return pure_program(loss, params, _batch(numbers))


class LinenMLP(nn.Module):
    split: Split
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        up = self.split.module(nn.Dense(HIDDEN, name="up", **kwargs), "d-", COLUMN, "dm", pin=True)
        down = self.split.module(nn.Dense(WIDTH, name="down", **kwargs), "dm", ROW, "d-")
        head = self.split.module(nn.Dense(CLASSES, name="head", **kwargs), "d-", COLUMN, "dm", pin=True)
        return head(x + down(nn.gelu(up(x))))


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    batch = _batch(Numbers(dtype))
    model = LinenMLP(split, dtype)
    params = jax.jit(model.init)(jax.random.key(0), batch[0])["params"]

    def loss(params: Any, state: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, x), labels), {}

    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(LEARNING_RATE))
    return linen_program(loss, state, batch)


class NnxMLP(nnx.Module):
    def __init__(self, split: Split, dtype: Any) -> None:
        kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.up = split.module(nnx.Linear(WIDTH, HIDDEN, **kwargs), "d-", COLUMN, "dm", pin=True)
        self.down = split.module(nnx.Linear(HIDDEN, WIDTH, **kwargs), "dm", ROW, "d-")
        self.head = split.module(nnx.Linear(WIDTH, CLASSES, **kwargs), "d-", COLUMN, "dm", pin=True)

    def __call__(self, x: Any) -> Any:
        return self.head(x + self.down(nnx.gelu(self.up(x))))


def make_nnx(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss(model: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(model(x), labels)

    return nnx_program(loss, NnxMLP(split, dtype), _batch(Numbers(dtype)))
