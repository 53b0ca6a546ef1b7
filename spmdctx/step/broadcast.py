"""parameter_broadcast: copies device 0's values to every device before the first step, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.step.direct.donation import check_alive
from spmdctx.step.entry import Entry
from spmdctx.step.processes import on_all
from spmdctx.trace.capture.layerwise import is_layerwise
from spmdctx.trace.capture.structure import Read

_SENT_ROLES = (Role.PARAMETER, Role.OPTIMIZER, Role.STATE)


def broadcast_read(entry: Entry, read: Read) -> Read:
    """Returns the leaves of the first call with device 0's values for replicated state; objects take these values over."""
    entry.environment.check_running()
    if any(isinstance(leaf, jax.core.Tracer) for leaf in read.leaves):
        raise UnsupportedError("parameter_broadcast needs arrays, and this step is called inside of jit, grad or vmap.")
    check_alive(entry.captured, read.leaves)
    leaves = broadcast_state(entry, read.leaves)
    entry.structure.place(read.handle, leaves)
    return read._replace(leaves=leaves)


def broadcast_state(entry: Entry, leaves: Sequence[Any]) -> list[Any]:
    """Returns the leaves of a call, with replicated state replaced by device 0's values; on a pipeline by those of each stage's first.

    State is parameters, optimizer state and other state. JAX takes the copies of a replicated array to be equal. They may
    differ if the array was assembled from single-device arrays, or belongs to several processes. Leaves that are split over
    devices and layerwise_parallel parameters stay as they are.
    """
    program, patterns = entry.program, entry.environment.settings.layerwise_parallel
    shared = [
        index
        for index, (leaf, target) in enumerate(zip(entry.captured.inputs, program.in_shardings, strict=True))
        if leaf.role in _SENT_ROLES and not is_layerwise(leaf, patterns) and target.is_fully_replicated
    ]
    found = list(leaves)
    meshes: dict[Any, list[int]] = {}
    for index in shared:
        meshes.setdefault(program.in_shardings[index].mesh, []).append(index)
    for mesh, own in meshes.items():  # one, or several of a pipeline, each with a first device
        if mesh.size == 1 or not program.in_shardings[own[0]].addressable_devices:
            continue
        given = [_on_mesh(leaves[index], program.in_shardings[index]) for index in own]
        for index, value in zip(own, from_first_device(given, mesh), strict=True):
            found[index] = value
    return found


def _on_mesh(leaf: Any, target: Any) -> Any:
    """Places a leaf on the mesh.

    An array that is already on all devices stays untouched, so that each device keeps the value that it has.
    """
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(target, leaf.ndim):
        return leaf
    if len({device.process_index for device in target.device_set}) > 1:
        return on_all(leaf, target)
    return jax.device_put(leaf, target) if isinstance(leaf, jax.Array) else leaf


def from_first_device(arrays: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Copies the first device's values of replicated arrays to every device of a mesh."""

    def replica(*own: Any) -> tuple[Any, ...]:
        is_first = jax.lax.axis_index(mesh.axis_names) == 0
        return tuple(_from_first(value, is_first, mesh.axis_names) for value in own)

    whole = PartitionSpec()
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    placed = jax.sharding.NamedSharding(mesh, whole)
    return list(jax.jit(mapped, in_shardings=placed, out_shardings=placed)(*arrays))


def _from_first(value: Any, is_first: Any, axes: tuple[str, ...]) -> Any:
    dtype = value.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_from_first(jax.random.key_data(value), is_first, axes), impl=jax.random.key_impl(value))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(*[_from_first(part, is_first, axes) for part in (value.real, value.imag)])
    # As integers, since -0.0 + 0.0 is 0.0 and a sum may change the bits of a NaN.
    bits = value.astype(jnp.uint8) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(value, f"uint{dtype.itemsize * 8}")
    bits = jax.lax.psum(jnp.where(is_first, bits, jnp.zeros_like(bits)), axes)
    return bits.astype(dtype) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(bits, dtype)
