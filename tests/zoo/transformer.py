"""A causal transformer language model whose layers run in one rematerialised scan."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.zoo.case import (
    BATCH,
    COLUMN,
    LEARNING_RATE,
    ROW,
    Numbers,
    Split,
    Step,
    cross_entropy,
    layer_norm,
    linen_program,
    nnx_program,
    pure_program,
)

LAYERS, SEQ, WIDTH, HEADS, HEAD_DIM, HIDDEN, VOCAB = 2, 24, 48, 24, 2, 96, 96

ATTENTION = "d-- -m- -m- -m- m--"
FEED_FORWARD = "d-- -m m-"
ATTENTION_WEIGHTS = {"query/kernel": "-m-", "key/kernel": "-m-", "value/kernel": "-m-", "out/kernel": "m--"}
"""Specs of the parameters of Flax's attention layers."""


def attention(x: Any, memory: Any, weights: Any, *, causal: bool) -> Any:
    """Multi-head attention of `x` over `memory`, both [batch, seq, width]."""
    query, key, value, out = weights
    q = jnp.einsum("bsd,dhk->bshk", x, query)
    k = jnp.einsum("bsd,dhk->bshk", memory, key)
    v = jnp.einsum("bsd,dhk->bshk", memory, value)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / jnp.sqrt(q.shape[-1]).astype(x.dtype)
    if causal:
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(visible, scores, -1e9)
    mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)
    return jnp.einsum("bqhk,hkd->bqd", mixed, out)


def self_attention(x: Any, *weights: Any) -> Any:
    return attention(x, x, weights, causal=True)


def feed_forward(x: Any, up: Any, down: Any) -> Any:
    return jax.nn.gelu(x @ up) @ down


def embed(tokens: Any, table: Any) -> Any:
    return table[tokens]


def unembed(x: Any, head: Any) -> Any:
    return x @ head


def attention_weights(numbers: Numbers, *lead: int) -> tuple[Any, ...]:
    """Query, key, value [width, heads, head_dim] and out [heads, head_dim, width], after the dimensions `lead`."""
    inward = [numbers.weight(*lead, WIDTH, HEADS, HEAD_DIM, fan_in=WIDTH) for _ in range(3)]
    return (*inward, numbers.weight(*lead, HEADS, HEAD_DIM, WIDTH, fan_in=WIDTH))


def _batch(numbers: Numbers) -> tuple[Any, ...]:
    return numbers.integers(VOCAB, BATCH, SEQ), numbers.integers(VOCAB, BATCH, SEQ)


def make_pytree(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    numbers = Numbers(dtype)
    params = {
        "embed": numbers.weight(VOCAB, WIDTH, fan_in=1),
        "layers": {
            "attention": attention_weights(numbers, LAYERS),
            "up": numbers.weight(LAYERS, WIDTH, HIDDEN, fan_in=WIDTH),
            "down": numbers.weight(LAYERS, HIDDEN, WIDTH, fan_in=HIDDEN),
            "norms": numbers.ones(LAYERS, 2, WIDTH),
        },
        "head": numbers.weight(WIDTH, VOCAB),
    }

    @jax.checkpoint
    def layer(x: Any, weights: Any) -> Any:
        normed = layer_norm(x, weights["norms"][0])
        x = x + split(self_attention, ATTENTION, "d--", pin="* -m- * * *")(normed, *weights["attention"])
        normed = layer_norm(x, weights["norms"][1])
        return x + split(feed_forward, FEED_FORWARD, "d--", pin="* -m *")(normed, weights["up"], weights["down"]), None

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x = split(embed, "d- m-", "d--")(tokens, params["embed"])
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return cross_entropy(split(unembed, "d-- -m", "d-m", pin="* -m")(x, params["head"]), labels)

    return pure_program(loss, params, _batch(numbers))


class LinenBlock(nn.Module):
    split: Split
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        attend = nn.MultiHeadDotProductAttention(HEADS, use_bias=False, name="attention", **kwargs)
        attend = self.split.module(attend, "d-- *", ATTENTION_WEIGHTS, "d--", pin=True)
        x = x + attend(nn.LayerNorm(**kwargs)(x), mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
        up = self.split.module(nn.Dense(HIDDEN, name="up", **kwargs), "d--", COLUMN, "d-m", pin=True)
        down = self.split.module(nn.Dense(WIDTH, name="down", **kwargs), "d-m", ROW, "d--")
        return x + down(nn.gelu(up(nn.LayerNorm(**kwargs)(x)))), None


class LinenTransformer(nn.Module):
    split: Split
    dtype: Any

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.Embed(VOCAB, WIDTH, name="embed", **kwargs)(tokens)
        stack = nn.scan(nn.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = stack(self.split, self.dtype, name="layers")(x, None)
        return self.split.module(nn.Dense(VOCAB, name="head", **kwargs), "d--", COLUMN, "d-m", pin=True)(x)


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    batch = _batch(Numbers(dtype))
    model = LinenTransformer(split, dtype)
    params = jax.jit(model.init)(jax.random.key(0), batch[0])["params"]

    def loss(params: Any, state: Any, tokens: Any, labels: Any) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, tokens), labels), {}

    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(LEARNING_RATE))
    return linen_program(loss, state, batch)


class NnxBlock(nnx.Module):
    def __init__(self, split: Split, dtype: Any, rngs: nnx.Rngs) -> None:
        kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        init = nnx.initializers.lecun_normal()
        self.split = split
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, **kwargs), nnx.LayerNorm(WIDTH, **kwargs)])
        shapes = {"query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
        for name, shape in shapes.items():
            weight = init(rngs.params(), shape, dtype)
            setattr(self, name, nnx.Param(weight.reshape((HEADS, HEAD_DIM, WIDTH) if name == "out" else (WIDTH, HEADS, HEAD_DIM))))
        self.up = split.module(nnx.Linear(WIDTH, HIDDEN, **kwargs), "d--", COLUMN, "d-m", pin=True)
        self.down = split.module(nnx.Linear(HIDDEN, WIDTH, **kwargs), "d-m", ROW, "d--")

    def __call__(self, x: Any) -> Any:
        weights = [weight[...] for weight in (self.query, self.key, self.value, self.out)]
        x = x + self.split(self_attention, ATTENTION, "d--", pin="* -m- * * *")(self.norms[0](x), *weights)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NnxTransformer(nnx.Module):
    def __init__(self, split: Split, dtype: Any) -> None:
        kwargs = {"dtype": dtype, "param_dtype": dtype}
        rngs = nnx.Rngs(0)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> NnxBlock:
            return NnxBlock(split, dtype, rngs)

        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **kwargs)
        self.layers = stack(rngs)
        self.head = split.module(nnx.Linear(WIDTH, VOCAB, rngs=rngs, **kwargs), "d--", COLUMN, "d-m", pin=True)

    def __call__(self, tokens: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x: Any, block: NnxBlock) -> Any:
            return block(x)

        return self.head(run(self.embed(tokens), self.layers))


def make_nnx(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss(model: Any, tokens: Any, labels: Any) -> Any:
        return cross_entropy(model(tokens), labels)

    return nnx_program(loss, NnxTransformer(split, dtype), _batch(Numbers(dtype)))
