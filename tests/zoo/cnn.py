"""A convolutional network with batch normalisation, whose running statistics are state beside the parameters."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.zoo.case import BATCH, LEARNING_RATE, Numbers, Split, Step, cross_entropy, linen_program, nnx_program

SIZE, CHANNELS, FEATURES, CLASSES = 12, 6, (24, 48), 24
KERNEL = (3, 3)
COLUMN = {"kernel": "---m"}
ROW = {"kernel": "--m-"}


def _batch(numbers: Numbers) -> tuple[Any, ...]:
    return numbers.normal(BATCH, SIZE, SIZE, CHANNELS), numbers.integers(CLASSES, BATCH)


class LinenCNN(nn.Module):
    split: Split
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        first = nn.Conv(FEATURES[0], KERNEL, use_bias=False, name="first", **kwargs)
        x = self.split.module(first, "d---", COLUMN, "d--m", pin=True)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm", **kwargs)(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        second = nn.Conv(FEATURES[1], KERNEL, use_bias=False, name="second", **kwargs)
        x = self.split.module(second, "d--m", ROW, "d---")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm2", **kwargs)(x))
        return nn.Dense(CLASSES, name="head", **kwargs)(x.mean((1, 2)))


class BatchNormState(TrainState):
    batch_stats: Any


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    batch = _batch(Numbers(dtype))
    model = LinenCNN(split, dtype)
    variables = jax.jit(model.init)(jax.random.key(0), batch[0])

    def loss(params: Any, state: Any, images: Any, labels: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels), changed

    state = BatchNormState.create(apply_fn=model.apply, tx=optax.adamw(LEARNING_RATE), **variables)
    return linen_program(loss, state, batch)


class NnxCNN(nnx.Module):
    def __init__(self, split: Split, dtype: Any) -> None:
        kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        first = nnx.Conv(CHANNELS, FEATURES[0], KERNEL, use_bias=False, **kwargs)
        second = nnx.Conv(FEATURES[0], FEATURES[1], KERNEL, use_bias=False, **kwargs)
        self.first = split.module(first, "d---", COLUMN, "d--m", pin=True)
        self.second = split.module(second, "d--m", ROW, "d---")
        self.norms = nnx.List([nnx.BatchNorm(features, momentum=0.9, **kwargs) for features in FEATURES])
        for norm in self.norms:  # flax keeps the running statistics in float32, whatever the dtype
            norm.mean, norm.var = nnx.BatchStat(norm.mean[...].astype(dtype)), nnx.BatchStat(norm.var[...].astype(dtype))
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(1))
        self.head = nnx.Linear(FEATURES[1], CLASSES, **kwargs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.norms[0](self.first(x))), (2, 2), (2, 2))
        x = nnx.relu(self.norms[1](self.second(x)))
        return self.head(self.dropout(x.mean((1, 2))))


def make_nnx(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss(model: Any, images: Any, labels: Any) -> Any:
        return cross_entropy(model(images), labels)

    return nnx_program(loss, NnxCNN(split, dtype), _batch(Numbers(dtype)))
