"""A bag-of-context language model whose embedding table is also its output layer."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.zoo.case import BATCH, COLUMN, LEARNING_RATE, ROW, Numbers, Split, Step, cross_entropy, linen_program, nnx_program, pure_program
from tests.zoo.transformer import embed, feed_forward

SEQ, WIDTH, HIDDEN, VOCAB = 24, 48, 96, 192


def _batch(numbers: Numbers) -> tuple[Any, ...]:
    return numbers.integers(VOCAB, BATCH, SEQ), numbers.integers(VOCAB, BATCH, SEQ)


def _attend(x: Any, table: Any) -> Any:
    return x @ table.T


def make_pytree(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    numbers = Numbers(dtype)
    params = {
        "table": numbers.weight(VOCAB, WIDTH, fan_in=WIDTH),
        "up": numbers.weight(WIDTH, HIDDEN),
        "down": numbers.weight(HIDDEN, WIDTH),
    }

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x = split(embed, "d- m-", "d--")(tokens, params["table"])
        x = x + split(feed_forward, "d-- -m m-", "d--", pin="* -m *")(x, params["up"], params["down"])
        return cross_entropy(split(_attend, "d-- m-", "d-m", pin="* m-")(x, params["table"]), labels)

    return pure_program(loss, params, _batch(numbers))


class LinenTied(nn.Module):
    split: Split
    dtype: Any

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        table = nn.Embed(VOCAB, WIDTH, name="table", **kwargs)
        x = table(tokens)
        up = self.split.module(nn.Dense(HIDDEN, name="up", **kwargs), "d--", COLUMN, "d-m", pin=True)
        down = self.split.module(nn.Dense(WIDTH, name="down", **kwargs), "d-m", ROW, "d--")
        return self.split(_attend, "d-- m-", "d-m", pin="* m-")(x + down(nn.gelu(up(x))), table.embedding)


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    batch = _batch(Numbers(dtype))
    model = LinenTied(split, dtype)
    params = jax.jit(model.init)(jax.random.key(0), batch[0])["params"]

    def loss(params: Any, state: Any, tokens: Any, labels: Any) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, tokens), labels), {}

    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(LEARNING_RATE))
    return linen_program(loss, state, batch)


class NnxTied(nnx.Module):
    def __init__(self, split: Split, dtype: Any) -> None:
        kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.split = split
        self.table = nnx.Embed(VOCAB, WIDTH, **kwargs)
        self.up = split.module(nnx.Linear(WIDTH, HIDDEN, **kwargs), "d--", COLUMN, "d-m", pin=True)
        self.down = split.module(nnx.Linear(HIDDEN, WIDTH, **kwargs), "d-m", ROW, "d--")

    def __call__(self, tokens: Any) -> Any:
        x = self.table(tokens)
        return self.split(_attend, "d-- m-", "d-m", pin="* m-")(x + self.down(nnx.gelu(self.up(x))), self.table.embedding[...])


def make_nnx(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss(model: Any, tokens: Any, labels: Any) -> Any:
        return cross_entropy(model(tokens), labels)

    return nnx_program(loss, NnxTied(split, dtype), _batch(Numbers(dtype)))
