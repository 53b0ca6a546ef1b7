"""Causal attention with rotary or distance-biased positions, heads that share keys and values, and learned queries."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from spmdctx.models.cache import KeyValues
from spmdctx.models.config import DecoderConfig
from spmdctx.models.layers import block_linear


def rotate(x: jax.Array, theta: float, start: jax.Array | None = None) -> jax.Array:
    """Applies the rotary embedding to [batch, seq, heads, head_dim]: pairs of features turn with the position (Su et al., 2021).

    `start` is the position of the first row, 0 if it is not given.
    """
    half = x.shape[-1] // 2
    wavelengths = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = _positions(x.shape[1], start)[:, None] * wavelengths
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _positions(seq: int, start: jax.Array | None) -> jax.Array:
    """Returns the positions of `seq` tokens, [seq] float32, which holds whole numbers up to 2**24."""
    positions = jnp.arange(seq, dtype=jnp.float32)
    return positions if start is None else positions + start


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns the slope of each head's bias (Press et al., "Train Short, Test Long", 2021): a geometric series down to 2**-8.

    If the number of heads is not a power of two, every second slope of the series twice as long follows that of the next smaller
    power.
    """
    power = 2 ** int(math.log2(num_heads))
    series = [2.0 ** (-8.0 * (index + 1) / power) for index in range(power)]
    between = [2.0 ** (-4.0 * (index + 1) / power) for index in range(0, 2 * (num_heads - power), 2)]
    return tuple(series + between)


class Attention(nnx.Module):
    """Causal self-attention whose query heads share key and value heads in groups.

    Attributes:
        past: keys and values of the tokens before, where text is generated; None where sequences are whole.
    """

    past: KeyValues | None = None

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.query = block_linear("query", config, rngs)
        self.key = block_linear("key", config, rngs)
        self.value = block_linear("value", config, rngs)
        self.out = block_linear("out", config, rngs)

    def __call__(self, x: jax.Array, source: jax.Array | None = None) -> jax.Array:
        """Maps [batch, seq, width] to the same; queries come from `source` [1, seq, width] if it is given."""
        config = self.config
        batch, seq, _ = x.shape
        groups = config.num_heads // config.num_kv_heads
        query = self._heads(self.query, x if source is None else source, config.num_heads)
        key = self._heads(self.key, x, config.num_kv_heads)
        value = self._heads(self.value, x, config.num_kv_heads)
        start = None if self.past is None else self.past.used[...]
        if config.positions == "rotary":
            query, key = rotate(query, config.rope_theta, start), rotate(key, config.rope_theta, start)
        if self.past is not None:
            key, value = self.past.extended(key, value)
        query = jnp.broadcast_to(query, (batch, seq, config.num_heads, config.head_dim))
        query = query.reshape(batch, seq, config.num_kv_heads, groups, config.head_dim) * config.head_dim**-0.5
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key, preferred_element_type=jnp.float32)
        if config.positions == "alibi":
            scores = scores + self._bias(key.shape[1])
        own = jnp.tril(jnp.ones((seq, seq), bool))
        visible = own if start is None else _positions(seq, start)[:, None] >= jnp.arange(key.shape[1])
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30)).astype(x.dtype)
        mixed = jnp.einsum("bhgqk,bkhd->bqhgd", weights, value)
        return self.out(mixed.reshape(batch, seq, config.num_heads * config.head_dim))

    def _heads(self, layer: nnx.Linear, x: jax.Array, num_heads: int) -> jax.Array:
        return layer(x).reshape(*x.shape[:2], num_heads, self.config.head_dim)

    def _bias(self, seq: int) -> jax.Array:
        """Returns the bias of the scores, [kv_heads, groups, 1, seq]: slope times the key's position.

        Softmax does not change when a row is shifted, so that this is slope times (key - query), and needs no [seq, seq] tensor.
        """
        slopes = jnp.asarray(alibi_slopes(self.config.num_heads), jnp.float32).reshape(self.config.num_kv_heads, -1, 1, 1)
        return slopes * jnp.arange(1 - seq, 1, dtype=jnp.float32)
