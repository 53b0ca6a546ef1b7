"""What the checks of split programs share: a machine on which searches split all they can, and what is said of crashes and results."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx

DEVICES = 8

_FREE_LINKS: Mapping[str, Any] = {
    "device": "free-links",
    "peak_flops_per_s": 1e10,
    "memory_bytes": 2**33,
    "memory_bytes_per_s": 1e9,
    "latency_s": 1e-9,
    "link_bytes_per_s": 1e13,
    "devices_per_host": DEVICES,
    "network_bytes_per_s": 1e12,
    "network_latency_s": 1e-8,
    "merges_partial_sums": False,
    "source": "made up: communication costs next to nothing, so that a search splits all it can",
}

FREE_LINKS = spmdctx.Topology(**_FREE_LINKS)

FREE_LINKS_SOURCE = f"spmdctx.Topology({', '.join(f'{name}={value!r}' for name, value in _FREE_LINKS.items())})"
"""The same machine as Python source, for scripts that repeat a check."""


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def crash_text(error: BaseException) -> str:
    """Returns the first line of an error and the places in spmdctx that it comes from, the innermost first."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "spmdctx" in frame.filename]
    places = [f"{frame.filename.split('spmdctx/')[-1]}:{frame.lineno}" for frame in frames[:-4:-1]]
    return f"{first_line(error)} ({' < '.join(places)})"


def plain_array(leaf: Any) -> np.ndarray[Any, Any]:
    """Returns a result as an array of NumPy; PRNG keys as their words."""
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)
