"""Leaves of a step on several processes: places one process's arrays on all devices, and gathers distributed arrays to one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from spmdctx.errors import UnsupportedError


def is_of_one_process(leaf: Any) -> bool:
    """Returns whether a leaf belongs to this process alone: a number, a NumPy array, or an array on its own devices."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def on_all(leaf: Any, target: Sharding) -> Any:
    """Places a leaf as `target`, over devices of several processes.

    Every process is taken to hold the same whole value of a leaf of one process. Each process places its own blocks.
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
    return jax.make_array_from_callback(array.shape, target, lambda index: array[index], dtype=array.dtype)


def to_host(leaf: Any) -> Any:
    """Gathers a whole leaf into this process's memory; every process has to call this."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(to_host(jax.random.key_data(leaf))), impl=jax.random.key_impl(leaf))
    if is_of_one_process(leaf) or leaf.is_fully_replicated:
        return np.asarray(leaf)
    everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
    return np.asarray(_moved(leaf, everywhere))


def is_spread(place: Sharding) -> bool:
    """Returns whether only some of the processes have devices of a sharding; every process gets the same answer."""
    devices: list[Any] = list(place.device_set)
    return bool(len({device.process_index for device in devices}) < jax.process_count())


def from_owners(leaf: jax.Array) -> np.ndarray:
    """Gathers an array of which only some processes have parts into each process's memory; every process has to call this.

    Raises:
        UnsupportedError: the array holds random keys, whose words JAX reads on their own devices alone.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise UnsupportedError(
            "Random keys that lie on devices of some processes cannot be read by the others.",
            fix="pass keys as words (jax.random.key_data), and wrap them in the step",
        )
    own = np.zeros(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            own[shard.index] = np.asarray(shard.data)
    # Each byte is zero in all processes but one.
    parts = multihost_utils.process_allgather(np.ascontiguousarray(own).reshape(-1).view(np.uint8))
    whole: np.ndarray = np.asarray(parts).sum(0, dtype=np.uint8).view(leaf.dtype).reshape(leaf.shape)
    return whole


def wait_for_all(what: str) -> None:
    """Waits until every process has called this; `what` names the place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def _moved(leaf: Any, target: Sharding) -> Any:
    if leaf.sharding.is_equivalent_to(target, leaf.ndim):
        return leaf
    return jax.jit(lambda value: value, out_shardings=target)(leaf)
