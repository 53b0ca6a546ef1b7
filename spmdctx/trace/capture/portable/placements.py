"""Tells what is said of one device, and of several: devices, meshes and shardings."""

from __future__ import annotations

from typing import Any

import jax


def is_one_device(placement: Any) -> bool:
    """Returns whether a device, mesh or sharding is of one device; those of no device at all are not."""
    if isinstance(placement, jax.Device):
        return True
    if isinstance(placement, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return not placement.empty and placement.size == 1
    if isinstance(placement, jax.sharding.NamedSharding):
        return is_one_device(placement.mesh)
    return isinstance(placement, jax.sharding.Sharding) and len(placement.device_set) == 1


def is_of_several(placement: Any) -> bool:
    """Returns whether a mesh or sharding is of several devices, whose axes are not in the types of values."""
    if isinstance(placement, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return placement.size > 1 and not placement.explicit_axes
    if isinstance(placement, jax.sharding.NamedSharding):
        return is_of_several(placement.mesh)
    return isinstance(placement, jax.sharding.Sharding) and len(placement.device_set) > 1


def is_on_one_device(aval: Any) -> bool:
    """Returns whether the type of an array names a mesh of one device."""
    return type(aval) is jax.core.ShapedArray and is_one_device(getattr(aval, "sharding", None))
