"""A mixture of experts with top-2 routing: each sequence is a group that fills its experts' places in order."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.zoo.case import BATCH, LEARNING_RATE, Numbers, Split, Step, cross_entropy, linen_program, nnx_program, pure_program

SEQ, WIDTH, HIDDEN, EXPERTS, CAPACITY, TOP_K, CLASSES = 24, 48, 96, 24, 4, 2, 24


def _batch(numbers: Numbers) -> tuple[Any, ...]:
    return numbers.normal(BATCH, SEQ, WIDTH), numbers.integers(CLASSES, BATCH, SEQ)


def route(x: Any, router: Any) -> Any:
    """Combine weights [batch, seq, experts, capacity]; zero where a token is not, or no longer, taken."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), TOP_K)
    picks = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)
    taken = picks.sum(2)
    places = jnp.cumsum(taken, axis=1) - taken
    slots = jax.nn.one_hot(places.astype(jnp.int32), CAPACITY, dtype=x.dtype)
    return jnp.einsum("bske,bsk->bse", picks, gates)[..., None] * taken[..., None] * slots


def dispatch(combine: Any, x: Any) -> Any:
    return jnp.einsum("bsec,bsd->ebcd", (combine > 0).astype(x.dtype), x)


def experts(x: Any, up: Any, down: Any) -> Any:
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", x, up))
    return jnp.einsum("ebcf,efd->ebcd", hidden, down)


def collect(combine: Any, x: Any) -> Any:
    return jnp.einsum("bsec,ebcd->bsd", combine, x)


def mixture(split: Split, x: Any, router: Any, up: Any, down: Any) -> Any:
    """The layer: route, dispatch, run the experts, collect."""
    combine = route(x, router)
    sent = split(dispatch, "d-m- d--", "md--")(combine, x)
    done = split(experts, "md-- m-- m--", "md--", pin="* m-- *")(sent, up, down)
    return split(collect, "d-m- md--", "d--")(combine, done)


def make_pytree(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    numbers = Numbers(dtype)
    params = {
        "router": numbers.weight(WIDTH, EXPERTS),
        "up": numbers.weight(EXPERTS, WIDTH, HIDDEN, fan_in=WIDTH),
        "down": numbers.weight(EXPERTS, HIDDEN, WIDTH, fan_in=HIDDEN),
        "head": numbers.weight(WIDTH, CLASSES),
    }

    def loss(params: Any, x: Any, labels: Any) -> Any:
        x = x + mixture(split, x, params["router"], params["up"], params["down"])
        return cross_entropy(x @ params["head"], labels)

    return pure_program(loss, params, _batch(numbers))


class LinenMoE(nn.Module):
    split: Split
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.initializers.lecun_normal(batch_axis=0)
        router = self.param("router", nn.initializers.lecun_normal(), (WIDTH, EXPERTS), self.dtype)
        up = self.param("up", init, (EXPERTS, WIDTH, HIDDEN), self.dtype)
        down = self.param("down", init, (EXPERTS, HIDDEN, WIDTH), self.dtype)
        x = x + mixture(self.split, x, router, up, down)
        return nn.Dense(CLASSES, name="head", dtype=self.dtype, param_dtype=self.dtype)(x)


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    batch = _batch(Numbers(dtype))
    model = LinenMoE(split, dtype)
    params = jax.jit(model.init)(jax.random.key(0), batch[0])["params"]

    def loss(params: Any, state: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, x), labels), {}

    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(LEARNING_RATE))
    return linen_program(loss, state, batch)


class NnxMoE(nnx.Module):
    def __init__(self, split: Split, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.split = split
        self.router = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, EXPERTS), dtype))
        self.up = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, HIDDEN), dtype))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, WIDTH), dtype))
        self.head = nnx.Linear(WIDTH, CLASSES, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(x + mixture(self.split, x, self.router[...], self.up[...], self.down[...]))


def make_nnx(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss(model: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(model(x), labels)

    return nnx_program(loss, NnxMoE(split, dtype), _batch(Numbers(dtype)))
