"""`get_mesh()`: the mesh that the user's own code sees while a step is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from spmdctx._compat import is_tracing
from spmdctx.errors import ContextError
from spmdctx.ir.layout import Layout
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.trace.capture.partitioning import reading_rules
from spmdctx.trace.capture.portable.placements import is_one_device
from spmdctx.trace.scope.environment import Environment
from spmdctx.trace.scope.rules import sizes_around
from spmdctx.trace.specs import make_mesh

_environment: ContextVar[Environment | None] = ContextVar("spmdctx_environment", default=None)


@contextmanager
def traced_for(environment: Environment) -> Iterator[None]:
    """Sets the environment of the step that is traced inside.

    `get_mesh` answers from it, and constraints that are bare PartitionSpecs use the step's own mesh.
    """
    token = _environment.set(environment)
    mesh = environment.given_mesh
    axes = mesh.sizes if mesh is not None else sizes_around()
    try:
        with reading_rules(environment.settings.rules, axes), _with_mesh(mesh, environment):
            yield
    finally:
        _environment.reset(token)


@contextmanager
def _with_mesh(mesh: LogicalMesh | None, environment: Environment) -> Iterator[None]:
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    # The kind of the devices of get_mesh(), which shard_map compares.
    with jax.sharding.use_abstract_mesh(_jax_mesh(mesh, environment.devices).abstract_mesh):
        yield


def get_mesh() -> Mesh | AbstractMesh:
    """Returns the mesh of the step that is being traced, for shard_map and for constraints with a NamedSharding.

    It is the mesh given as `mesh=`, else the mesh of a Layout over all devices in dataset_strategy. Otherwise, in data_parallel
    and hybrid_parallel, it has one axis, "data". The mesh is abstract if there are fewer devices than the plan needs.

    Raises:
        ContextError: no step is being traced, or its mode finds the mesh after the trace.
    """
    environment = _environment.get()
    if environment is None:
        raise ContextError("get_mesh() is called outside of a step.", fix="call it inside the function given to spmdctx.parallel")
    mesh, mode = environment.settings.mesh, environment.context.parallel_mode
    if mesh is None and mode in ("semi_auto_parallel", "auto_parallel") and environment.settings.num_devices > 1:
        mesh = _mesh_of_layouts(environment)
        if mesh is None:
            raise ContextError(
                f"In {mode} the mesh is found after the step is traced.",
                fix='name it: spmdctx.parallel(fn, mesh={"data": 4, "model": 2}), or give a Layout over all devices in dataset_strategy',
            )
    if mesh is None:
        mesh = LogicalMesh.of({"data": environment.settings.num_devices})
    return _jax_mesh(mesh, environment.devices)


def _mesh_of_layouts(environment: Environment) -> LogicalMesh | None:
    """Returns the mesh of the first Layout in dataset_strategy that covers all devices, or None; the step gets this mesh."""
    strategy = environment.context.dataset_strategy
    layouts = [entry for entry in strategy if isinstance(entry, Layout)] if isinstance(strategy, tuple) else []
    meshes = [LogicalMesh(tuple(zip(layout.alias_name, layout.device_matrix, strict=True))) for layout in layouts]
    return next((mesh for mesh in meshes if mesh.num_devices == environment.settings.num_devices), None)


def has_explicit_axes() -> bool:
    """Returns whether the mesh that the user set has Explicit axes, which put shardings into the types of traced values."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def has_explicit_type(array: jax.Array) -> bool:
    """Returns whether an array's type holds a sharding over Explicit axes."""
    return AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types


def has_mesh_type(array: Any) -> bool:
    """Returns whether an array's type names its mesh; JAX compiles a program again for one whose type does not."""
    return not jax.typeof(array).sharding.mesh.empty


@contextmanager
def auto_axes() -> Iterator[None]:
    """Turns the Explicit axes of the mesh that the user set into Auto axes, so that the plan decides how they are used."""
    mesh = jax.sharding.get_abstract_mesh()
    if not has_explicit_axes():
        yield
        return
    types = tuple(AxisType.Auto if kind is AxisType.Explicit else kind for kind in mesh.axis_types)
    with jax.sharding.use_abstract_mesh(AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)):
        yield


@contextmanager
def without_one_device(num_devices: int) -> Iterator[None]:
    """Unsets the mesh that the user set if it is of one device and a program is for several: JAX would refuse to run it."""
    if num_devices == 1 or not is_one_device(jax.sharding.get_abstract_mesh()) or is_tracing():
        yield
        return
    with jax.set_mesh(Mesh(np.empty((), dtype=object), ())):
        yield


def _jax_mesh(mesh: LogicalMesh, devices: tuple[Any, ...]) -> Mesh | AbstractMesh:
    if mesh.num_devices <= len(devices):
        return make_mesh(mesh, devices)
    return AbstractMesh(mesh.shape, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.axes))
