"""A graph network: messages along edges, gathered from their senders and summed at their receivers with segment_sum."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.zoo.case import COLUMN, LEARNING_RATE, ROW, Numbers, Split, Step, cross_entropy, linen_program, nnx_program, pure_program

NODES, EDGES, WIDTH, HIDDEN, CLASSES = 96, 384, 48, 96, 24


def _batch(numbers: Numbers) -> tuple[Any, ...]:
    edges = (numbers.integers(NODES, EDGES), numbers.integers(NODES, EDGES))
    return (numbers.normal(NODES, WIDTH), *edges, numbers.integers(CLASSES, NODES))


def _messages(sent: Any, received: Any, from_sender: Any, from_receiver: Any, out: Any) -> Any:
    return jax.nn.relu(sent @ from_sender + received @ from_receiver) @ out


def _update(x: Any, up: Any, down: Any) -> Any:
    return jax.nn.relu(x @ up) @ down


def propagate(split: Split, x: Any, senders: Any, receivers: Any, weights: Any) -> Any:
    """One round: messages [edges, width], their sums [nodes, width], the update of the nodes."""
    send = split(_messages, "d- d- -m -m m-", "d-", pin="* * -m * *")
    messages = send(x[senders], x[receivers], weights["from_sender"], weights["from_receiver"], weights["message"])
    received = jax.ops.segment_sum(messages, receivers, num_segments=x.shape[0])
    return x + split(_update, "d- -m m-", "d-", pin="* -m *")(x + received, weights["up"], weights["down"])


def make_pytree(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    numbers = Numbers(dtype)
    weights = {
        "from_sender": numbers.weight(WIDTH, HIDDEN),
        "from_receiver": numbers.weight(WIDTH, HIDDEN),
        "message": numbers.weight(HIDDEN, WIDTH),
        "up": numbers.weight(WIDTH, HIDDEN),
        "down": numbers.weight(HIDDEN, WIDTH),
    }
    params = {"round": weights, "head": numbers.weight(WIDTH, CLASSES)}

    def loss(params: Any, nodes: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        x = propagate(split, nodes, senders, receivers, params["round"])
        return cross_entropy(x @ params["head"], labels)

    return pure_program(loss, params, _batch(numbers))


class LinenGNN(nn.Module):
    split: Split
    dtype: Any

    @nn.compact
    def __call__(self, nodes: Any, senders: Any, receivers: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        message = self.split.module(nn.Dense(HIDDEN, name="message", **kwargs), "d-", COLUMN, "dm", pin=True)
        update = self.split.module(nn.Dense(WIDTH, name="update", **kwargs), "dm", ROW, "d-")
        messages = nn.relu(message(jnp.concatenate([nodes[senders], nodes[receivers]], axis=-1)))
        received = jax.ops.segment_sum(messages, receivers, num_segments=NODES)
        return nn.Dense(CLASSES, name="head", **kwargs)(nodes + update(received))


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    batch = _batch(Numbers(dtype))
    model = LinenGNN(split, dtype)
    params = jax.jit(model.init)(jax.random.key(0), *batch[:3])["params"]

    def loss(params: Any, state: Any, nodes: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, nodes, senders, receivers), labels), {}

    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(LEARNING_RATE))
    return linen_program(loss, state, batch)


class NnxGNN(nnx.Module):
    def __init__(self, split: Split, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        shapes = {
            "from_sender": (WIDTH, HIDDEN),
            "from_receiver": (WIDTH, HIDDEN),
            "message": (HIDDEN, WIDTH),
            "up": (WIDTH, HIDDEN),
            "down": (HIDDEN, WIDTH),
        }
        init = nnx.initializers.lecun_normal()
        self.split = split
        self.weights = nnx.Dict({name: nnx.Param(init(rngs.params(), shape, dtype)) for name, shape in shapes.items()})
        self.head = nnx.Linear(WIDTH, CLASSES, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, nodes: Any, senders: Any, receivers: Any) -> Any:
        weights = {name: weight[...] for name, weight in self.weights.items()}
        return self.head(propagate(self.split, nodes, senders, receivers, weights))


def make_nnx(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss(model: Any, nodes: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        return cross_entropy(model(nodes, senders, receivers), labels)

    return nnx_program(loss, NnxGNN(split, dtype), _batch(Numbers(dtype)))
