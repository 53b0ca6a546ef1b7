"""An encoder-decoder: the decoder attends to itself causally and to the encoder's output."""

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
from tests.zoo.transformer import (
    ATTENTION,
    ATTENTION_WEIGHTS,
    FEED_FORWARD,
    HEADS,
    HIDDEN,
    SEQ,
    VOCAB,
    WIDTH,
    attention,
    attention_weights,
    embed,
    feed_forward,
    self_attention,
    unembed,
)


def _batch(numbers: Numbers) -> tuple[Any, ...]:
    return numbers.integers(VOCAB, BATCH, SEQ), numbers.integers(VOCAB, BATCH, SEQ), numbers.integers(VOCAB, BATCH, SEQ)


def _encode_attention(x: Any, *weights: Any) -> Any:
    return attention(x, x, weights, causal=False)


def _cross_attention(x: Any, memory: Any, *weights: Any) -> Any:
    return attention(x, memory, weights, causal=False)


def make_pytree(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    numbers = Numbers(dtype)

    def mlp() -> Any:
        return numbers.weight(WIDTH, HIDDEN), numbers.weight(HIDDEN, WIDTH)

    params = {
        "embed": numbers.weight(VOCAB, WIDTH, fan_in=1),
        "encoder": {"attention": attention_weights(numbers), "mlp": mlp(), "norms": numbers.ones(2, WIDTH)},
        "decoder": {
            "attention": attention_weights(numbers),
            "cross": attention_weights(numbers),
            "mlp": mlp(),
            "norms": numbers.ones(3, WIDTH),
        },
        "head": numbers.weight(WIDTH, VOCAB),
    }
    pin = "* -m- * * *"
    run_mlp = split(feed_forward, FEED_FORWARD, "d--", pin="* -m *")

    def encode(weights: Any, x: Any) -> Any:
        x = x + split(_encode_attention, ATTENTION, "d--", pin=pin)(layer_norm(x, weights["norms"][0]), *weights["attention"])
        return x + run_mlp(layer_norm(x, weights["norms"][1]), *weights["mlp"])

    def decode(weights: Any, x: Any, memory: Any) -> Any:
        x = x + split(self_attention, ATTENTION, "d--", pin=pin)(layer_norm(x, weights["norms"][0]), *weights["attention"])
        cross = split(_cross_attention, "d-- " + ATTENTION, "d--", pin="* " + pin)
        x = x + cross(layer_norm(x, weights["norms"][1]), memory, *weights["cross"])
        return x + run_mlp(layer_norm(x, weights["norms"][2]), *weights["mlp"])

    def loss(params: Any, source: Any, target: Any, labels: Any) -> Any:
        lookup = split(embed, "d- m-", "d--")
        memory = encode(params["encoder"], lookup(source, params["embed"]))
        x = decode(params["decoder"], lookup(target, params["embed"]), memory)
        return cross_entropy(split(unembed, "d-- -m", "d-m", pin="* -m")(x, params["head"]), labels)

    return pure_program(loss, params, _batch(numbers))


class LinenEncoderDecoder(nn.Module):
    split: Split
    dtype: Any

    @nn.compact
    def __call__(self, source: Any, target: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        lookup = nn.Embed(VOCAB, WIDTH, name="embed", **kwargs)
        memory, x = lookup(source), lookup(target)
        memory = memory + self._attend("encode", "d--")(nn.LayerNorm(**kwargs)(memory))
        memory = memory + self._mlp("encode", nn.LayerNorm(**kwargs)(memory))
        mask = nn.make_causal_mask(jnp.ones(target.shape))
        x = x + self._attend("decode", "d-- *")(nn.LayerNorm(**kwargs)(x), mask=mask)
        x = x + self._attend("cross", "d-- d--")(nn.LayerNorm(**kwargs)(x), memory)
        x = x + self._mlp("decode", nn.LayerNorm(**kwargs)(x))
        return self.split.module(nn.Dense(VOCAB, name="head", **kwargs), "d--", COLUMN, "d-m", pin=True)(x)

    def _attend(self, name: str, spec: str) -> nn.Module:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        attend = nn.MultiHeadDotProductAttention(HEADS, use_bias=False, name=f"{name}_attention", **kwargs)
        return self.split.module(attend, spec, ATTENTION_WEIGHTS, "d--", pin=True)

    def _mlp(self, name: str, x: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        up = self.split.module(nn.Dense(HIDDEN, name=f"{name}_up", **kwargs), "d--", COLUMN, "d-m", pin=True)
        down = self.split.module(nn.Dense(WIDTH, name=f"{name}_down", **kwargs), "d-m", ROW, "d--")
        return down(nn.gelu(up(x)))


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    batch = _batch(Numbers(dtype))
    model = LinenEncoderDecoder(split, dtype)
    params = jax.jit(model.init)(jax.random.key(0), *batch[:2])["params"]

    def loss(params: Any, state: Any, source: Any, target: Any, labels: Any) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, source, target), labels), {}

    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(LEARNING_RATE))
    return linen_program(loss, state, batch)


class NnxEncoderDecoder(nnx.Module):
    def __init__(self, split: Split, dtype: Any) -> None:
        kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}

        def attend(spec: str) -> nnx.Module:
            attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, **kwargs)
            return split.module(attention, spec, ATTENTION_WEIGHTS, "d--", pin=True)

        def mlp() -> nnx.Module:
            up = split.module(nnx.Linear(WIDTH, HIDDEN, **kwargs), "d--", COLUMN, "d-m", pin=True)
            down = split.module(nnx.Linear(HIDDEN, WIDTH, **kwargs), "d-m", ROW, "d--")
            return nnx.Sequential(up, nnx.gelu, down)

        self.embed = nnx.Embed(VOCAB, WIDTH, **kwargs)
        self.encoder_attention, self.decoder_attention, self.cross_attention = attend("d--"), attend("d-- *"), attend("d-- d--")
        self.encoder_mlp, self.decoder_mlp = mlp(), mlp()
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, **kwargs) for _ in range(5)])
        self.head = split.module(nnx.Linear(WIDTH, VOCAB, **kwargs), "d--", COLUMN, "d-m", pin=True)

    def __call__(self, source: Any, target: Any) -> Any:
        memory, x = self.embed(source), self.embed(target)
        memory = memory + self.encoder_attention(self.norms[0](memory))
        memory = memory + self.encoder_mlp(self.norms[1](memory))
        x = x + self.decoder_attention(self.norms[2](x), mask=nnx.make_causal_mask(target))
        x = x + self.cross_attention(self.norms[3](x), memory)
        return self.head(x + self.decoder_mlp(self.norms[4](x)))


def make_nnx(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss(model: Any, source: Any, target: Any, labels: Any) -> Any:
        return cross_entropy(model(source, target), labels)

    return nnx_program(loss, NnxEncoderDecoder(split, dtype), _batch(Numbers(dtype)))
