"""PRNG keys of replicas and micro-batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def fold(key: Any, number: Any) -> Any:
    """Derives another key for each number from a key, or an array of keys, typed or raw."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    folded = jax.random.fold_in
    for _ in range(key.ndim if typed else key.ndim - 1):
        folded = jax.vmap(folded, in_axes=(0, None))
    return folded(key, number)
