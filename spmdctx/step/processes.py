"""Leaves of a step on several processes: arrays of one process put on the devices of all, and arrays of all read by one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding


def is_of_one_process(leaf: Any) -> bool:
    """Whether a leaf is a value of the process's own: a number, a NumPy array, or an array on its devices alone."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def on_all(leaf: Any, target: Sharding) -> Any:
    """A leaf as an array that is placed as `target`, over devices of several processes.

    A leaf of one process is taken as a copy of the whole that every process has; each puts its own blocks on its devices.
    """
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        if not is_of_one_process(leaf):
            return _moved(leaf, target)
        return jax.random.wrap_key_data(on_all(jax.random.key_data(leaf), target), impl=jax.random.key_impl(leaf))
    if not is_of_one_process(leaf):
        return _moved(leaf, target)
    if jax.typeof(leaf).weak_type and not np.ndim(leaf):
        return jax.device_put(np.asarray(leaf).item(), target)
    array = np.asarray(leaf, dtype=jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))
    return jax.make_array_from_callback(array.shape, target, lambda index: array[index])


def to_host(leaf: Any) -> Any:
    """A leaf whole, in this process's memory; every process has to ask for it."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(to_host(jax.random.key_data(leaf))), impl=jax.random.key_impl(leaf))
    if is_of_one_process(leaf) or leaf.is_fully_replicated:
        return np.asarray(leaf)
    everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
    return np.asarray(_moved(leaf, everywhere))


def wait_for_all(what: str) -> None:
    """Waits until every process has come here; `what` names the place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def _moved(leaf: Any, target: Sharding) -> Any:
    if leaf.sharding.is_equivalent_to(target, leaf.ndim):
        return leaf
    return jax.jit(lambda value: value, out_shardings=target)(leaf)
