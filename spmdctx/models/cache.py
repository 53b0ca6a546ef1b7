"""The cache of keys and values: attention layers keep those of past tokens, so that each new token costs one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from spmdctx.errors import ContextError
from spmdctx.models.config import DecoderConfig

T = TypeVar("T")


class KeyValues(nnx.Module):
    """The keys and values that one attention layer keeps.

    Args:
        config: sizes and options.
        batch: the number of sequences.
        length: the number of tokens for which there is room.
    """

    def __init__(self, config: DecoderConfig, batch: int, length: int) -> None:
        shape = (batch, length, config.num_kv_heads, config.head_dim)
        self.key = nnx.Cache(jnp.zeros(shape, config.dtype))
        self.value = nnx.Cache(jnp.zeros(shape, config.dtype))
        self.used = nnx.Cache(jnp.zeros((), jnp.int32))

    def extended(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keeps the keys and values [batch, seq, kv_heads, head_dim] of the next tokens; gives all of them, [batch, length, ...]."""
        used = self.used[...]
        for kept, new in ((self.key, key), (self.value, value)):
            kept[...] = jax.lax.dynamic_update_slice_in_dim(kept[...], new.astype(kept.dtype), used, axis=1)
        self.used[...] = used + key.shape[1]
        return self.key[...].astype(key.dtype), self.value[...].astype(value.dtype)


def stacked(make: Callable[[], T], count: int) -> T:
    """Makes `count` modules as one whose variables have a leading dimension, as a scan over layers takes them."""
    build: Callable[[], T] = nnx.vmap(make, in_axes=(), out_axes=0, axis_size=count)
    return build()


def check_length(config: DecoderConfig, length: int) -> None:
    """Refuses more tokens than the model has positions.

    Raises:
        ContextError: the positions are learned and too few.
    """
    if length > config.max_seq and (config.positions == "learned" or config.query_layer):
        raise ContextError("The sequence is longer than the learned positions.", got=f"{length} tokens", need=f"at most {config.max_seq}")
