"""Converts TensorShardings to JAX; only this module makes PartitionSpecs and jax meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdctx.errors import ContextError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import TensorSharding
from spmdctx.wording import counted


def make_mesh(mesh: LogicalMesh, devices: Sequence[Any]) -> Mesh:
    """Makes a jax mesh with Auto axes over the first of `devices`, in their order.

    Raises:
        ContextError: there are fewer devices than the mesh needs.
    """
    if len(devices) < mesh.num_devices:
        raise ContextError(
            f"The plan needs {counted(mesh.num_devices, 'device')}, but only {len(devices)} {'is' if len(devices) == 1 else 'are'} there.",
            fix="plan() works without devices; to run, lower device_num or pass devices=",
        )
    grid = np.array(list(devices[: mesh.num_devices]), dtype=object).reshape(mesh.shape)
    return Mesh(grid, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.axes))


def partition_spec(sharding: TensorSharding) -> PartitionSpec:
    """Returns the PartitionSpec of a sharding without whole trailing dimensions."""
    dims = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in sharding]
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def named_sharding(mesh: Mesh, sharding: TensorSharding) -> NamedSharding:
    """Returns the NamedSharding of a sharding on a mesh."""
    return NamedSharding(mesh, partition_spec(sharding))
