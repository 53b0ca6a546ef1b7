"""The mesh that the user's own code sees while a step is traced: `get_mesh()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from spmdctx.errors import ContextError
from spmdctx.ir.layout import Layout
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.trace.scope.environment import Environment
from spmdctx.trace.specs import make_mesh

_environment: ContextVar[Environment | None] = ContextVar("spmdctx_environment", default=None)


@contextmanager
def traced_for(environment: Environment) -> Iterator[None]:
    """While a step is traced: what `get_mesh` answers from, and the step's own mesh for constraints that are bare PartitionSpecs."""
    token = _environment.set(environment)
    mesh = environment.given_mesh
    try:
        if mesh is None or not jax.sharding.get_abstract_mesh().empty:
            yield
        else:
            # Of the devices that get_mesh() has: shard_map compares their kinds.
            with jax.sharding.use_abstract_mesh(_jax_mesh(mesh, environment.devices).abstract_mesh):
                yield
    finally:
        _environment.reset(token)


def get_mesh() -> Mesh | AbstractMesh:
    """The mesh of the step that is being traced: for shard_map, and for constraints with a NamedSharding.

    It is the one given as `mesh=`, else that of a Layout over all devices in dataset_strategy, else, in data_parallel and
    hybrid_parallel, one axis, "data". Where there are fewer devices than the plan is for, the mesh is abstract.

    Raises:
        ContextError: outside of a step, or in a mode that finds its mesh after the trace.
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
    """The axes of the first Layout in dataset_strategy that has all devices: a step that uses them gets this mesh."""
    strategy = environment.context.dataset_strategy
    layouts = [entry for entry in strategy if isinstance(entry, Layout)] if isinstance(strategy, tuple) else []
    meshes = [LogicalMesh(tuple(zip(layout.alias_name, layout.device_matrix, strict=True))) for layout in layouts]
    return next((mesh for mesh in meshes if mesh.num_devices == environment.settings.num_devices), None)


def has_explicit_axes() -> bool:
    """Whether the mesh that the user set has Explicit axes, which put shardings into the types of what is traced."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def has_explicit_type(array: jax.Array) -> bool:
    """Whether an array's type holds a sharding over Explicit axes."""
    return AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types


def has_mesh_type(array: Any) -> bool:
    """Whether an array's type names the mesh that it is placed on; a program is compiled again for one that does not."""
    return not jax.typeof(array).sharding.mesh.empty


@contextmanager
def auto_axes() -> Iterator[None]:
    """The mesh that the user set with its Explicit axes made Auto, so that the plan says how they are used."""
    mesh = jax.sharding.get_abstract_mesh()
    if not has_explicit_axes():
        yield
        return
    types = tuple(AxisType.Auto if kind is AxisType.Explicit else kind for kind in mesh.axis_types)
    with jax.sharding.use_abstract_mesh(AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)):
        yield


def _jax_mesh(mesh: LogicalMesh, devices: tuple[Any, ...]) -> Mesh | AbstractMesh:
    if mesh.num_devices <= len(devices):
        return make_mesh(mesh, devices)
    return AbstractMesh(mesh.shape, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.axes))
