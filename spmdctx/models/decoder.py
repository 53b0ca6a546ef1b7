"""A Llama-style decoder in Flax NNX: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdctx.models.config import DecoderConfig
from spmdctx.models.strategies import ATTENTION, ATTENTION_PIN, FEED_FORWARD, FEED_FORWARD_PIN, UNSPLIT, Split


def _linear(inputs: int, outputs: int, config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype), rngs=rngs)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of [batch, seq, heads, head_dim]: pairs of features turn with the position (Su et al., 2021)."""
    half = x.shape[-1] // 2
    wavelengths = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * wavelengths
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention whose query heads share key and value heads in groups."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        self.config = config
        self.query = _linear(config.width, heads, config, rngs)
        self.key = _linear(config.width, kv_heads, config, rngs)
        self.value = _linear(config.width, kv_heads, config, rngs)
        self.out = _linear(heads, config.width, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, width] to the same."""
        config = self.config
        batch, seq, _ = x.shape
        groups = config.num_heads // config.num_kv_heads
        query = rotate(self.query(x).reshape(batch, seq, config.num_heads, config.head_dim), config.rope_theta)
        key = rotate(self.key(x).reshape(batch, seq, config.num_kv_heads, config.head_dim), config.rope_theta)
        value = self.value(x).reshape(batch, seq, config.num_kv_heads, config.head_dim)
        query = query.reshape(batch, seq, config.num_kv_heads, groups, config.head_dim) * config.head_dim**-0.5
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key, preferred_element_type=jnp.float32)
        visible = jnp.tril(jnp.ones((seq, seq), bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30)).astype(x.dtype)
        mixed = jnp.einsum("bhgqk,bkhd->bqhgd", weights, value)
        return self.out(mixed.reshape(batch, seq, config.num_heads * config.head_dim))


class FeedForward(nnx.Module):
    """SwiGLU: a gated layer up, one down (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.gate = _linear(config.width, config.hidden, config, rngs)
        self.up = _linear(config.width, config.hidden, config, rngs)
        self.down = _linear(config.hidden, config.width, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, width] to the same."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: attention and feed-forward, each on the normalised residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, split: Split = UNSPLIT) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = split.layer(Attention(config, rngs), ATTENTION, ATTENTION_PIN)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = split.layer(FeedForward(config, rngs), FEED_FORWARD, FEED_FORWARD_PIN)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, width] to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _norm(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    return nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def _embedding(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Embed:
    dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    init = nnx.initializers.normal(0.02)
    return nnx.Embed(config.vocab_size, config.width, dtype=dtype, param_dtype=param_dtype, embedding_init=init, rngs=rngs)


class Decoder(nnx.Module):
    """The language model: tokens [batch, seq] to logits [batch, seq, vocab_size] in float32 or wider.

    Args:
        config: sizes and options.
        rngs: random numbers for the parameters.
        split: strategies that `shard()` gives the layers.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, split: Split = UNSPLIT) -> None:
        self.config = config
        self.embedding = split.embedding(_embedding(config, rngs))
        self.layers: Any = _stacked(config, rngs, split) if config.scan_layers else _unrolled(config, rngs, split)
        self.norm = _norm(config, rngs)
        self.head = split.head(_linear(config.width, config.vocab_size, config, rngs))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token at every position."""
        x = self.embedding(tokens)
        step: Callable[[jax.Array, Block], jax.Array] = nnx.remat(_run_block) if self.config.remat else _run_block
        if self.config.scan_layers:
            x = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for block in self.layers:
                x = step(x, block)
        logits = self.head(self.norm(x))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _run_block(x: jax.Array, block: Block) -> jax.Array:
    return block(x)


def _unrolled(config: DecoderConfig, rngs: nnx.Rngs, split: Split) -> nnx.List[Block]:
    return nnx.List([Block(config, rngs, split) for _ in range(config.num_layers)])


def _stacked(config: DecoderConfig, rngs: nnx.Rngs, split: Split) -> Block:
    """One block whose parameters have a leading layer dimension."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def build(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs, split)

    return build(rngs)
