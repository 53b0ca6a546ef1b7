"""The options that `parallel` and `plan` take in addition to the context's, checked when the step is made."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from spmdctx.context.layers import AutoParallelContext, ContextLayer
from spmdctx.context.options import BY_NAME, checked
from spmdctx.context.typed import ContextOptions
from spmdctx.context.values import memory_budget
from spmdctx.errors import ContextError, message, naming_file, shown
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import topology
from spmdctx.machine.topology import Topology
from spmdctx.search.setup.meshes import MAX_AXES
from spmdctx.trace.scope.rules import axis_rules
from spmdctx.trace.scope.settings import StepOptions

_OF_PARALLEL = ("devices", "mesh", "topology", "memory_bytes", "max_mesh_axes", "strict", "layerwise_parallel", "rules")


class ParallelOptions(ContextOptions, total=False):
    """The options of `parallel` and `plan`, as type checkers and editors know them."""

    devices: Sequence[jax.Device] | np.ndarray | None
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None
    topology: MachineName | Topology | os.PathLike[str] | str | None
    memory_bytes: float | None
    max_mesh_axes: int | None
    strict: bool
    layerwise_parallel: str | Sequence[str]
    rules: Mapping[str, str | Sequence[str] | None] | Sequence[tuple[str, str | Sequence[str] | None]]
    batch_argnums: int | Sequence[int]
    batch_argnames: str | Iterable[str]
    static_argnums: int | Sequence[int]
    static_argnames: str | Iterable[str]
    donate_argnums: int | Sequence[int]
    donate_argnames: str | Iterable[str]


MachineName = Literal["tpu-v5e", "tpu-v5p", "tpu-v6e", "h100", "h200", "a100", "cpu"]

_MAX_AXES, _MAX_DEVICES = 32, 1 << 20

_ARGUMENTS = ("batch_argnums", "batch_argnames", "static_argnums", "static_argnames", "donate_argnums", "donate_argnames")


def options_by_name(call: str, value: object) -> TypeError:
    """Returns the error for an option that is given to a call by its position, with the way to write it."""
    fix = "give the step alone, and options by their names, such as parallel_mode='auto_parallel'"
    if isinstance(value, Mesh | AbstractMesh):
        fix = "mesh=..."
    elif isinstance(value, Mapping):
        fix = "write ** before a dictionary of options"
    elif isinstance(value, AutoParallelContext | ContextLayer):
        fix = "with spmdctx.auto_parallel_context(...): spmdctx.parallel(step), or the same options by their names"
    elif isinstance(value, str):
        options = [(name, choice) for name in ("parallel_mode", "search_mode") for choice in BY_NAME[name].choices]
        near = get_close_matches(value, [choice for _, choice in options], n=1)
        fix = next((f"{name}={choice!r}" for name, choice in options if near == [choice]), fix)
    return TypeError(message(f"{call} takes options by their names only.", got=shown(value), fix=fix))


def step_options(options: Mapping[str, Any]) -> StepOptions:
    """Checks the options of a step; any other name must be an option of the context.

    Raises:
        ContextError: an unknown name or a bad value.
        TypeError: a value of a wrong type.
        OSError: the file of a topology cannot be read.
    """
    own = {name: value for name, value in options.items() if name in _OF_PARALLEL and value is not None}
    devices, mesh, notes = _devices_and_mesh(own.get("devices"), own.get("mesh"))
    return StepOptions(
        context=checked({name: value for name, value in options.items() if name not in (*_OF_PARALLEL, *_ARGUMENTS)}),
        devices=devices,
        mesh=mesh,
        topology=_topology(own["topology"]) if "topology" in own else None,
        memory_bytes=memory_budget(own.get("memory_bytes")),
        max_mesh_axes=_max_mesh_axes(own.get("max_mesh_axes")),
        strict=_boolean("strict", own.get("strict", False)),
        layerwise_parallel=_patterns(own.get("layerwise_parallel", ())),
        rules=axis_rules(own.get("rules", ())),
        arguments={name: value for name, value in options.items() if name in _ARGUMENTS},
        notes=notes,
    )


def _topology(value: Any) -> Topology:
    with naming_file("topology", value, "the file cannot be read"):
        return topology(value)


def _max_mesh_axes(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(message("max_mesh_axes must be an int.", got=shown(value)))
    if not 1 <= value <= MAX_AXES:
        raise ContextError("max_mesh_axes is out of range.", got=shown(value), need=f"1 to {MAX_AXES}")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(message(f"{name} must be a bool.", got=shown(value)))
    return value


def _patterns(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(entry, str) for entry in value):
        raise TypeError(message("layerwise_parallel must be a list of path patterns.", got=shown(value)))
    return tuple(value)


def _devices_and_mesh(devices: Any, mesh: Any) -> tuple[tuple[Any, ...] | None, LogicalMesh | None, tuple[str, ...]]:
    if devices is not None and mesh is not None and isinstance(mesh, Mesh):
        raise ContextError("devices and a Mesh with devices of its own are both given.", fix="leave one of the two out")
    if devices is not None:
        devices = _devices(devices)
    if mesh is None:
        return devices, None, ()
    notes: tuple[str, ...] = ()
    if isinstance(mesh, Mesh | AbstractMesh):
        own = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is not AxisType.Auto)
        if own:
            notes = (f"mesh: the axes {', '.join(own)} are treated as Auto, so that the plan can say how they are used.",)
        if isinstance(mesh, Mesh):
            devices = tuple(mesh.devices.flat)
        return devices, LogicalMesh.of({str(name): size for name, size in mesh.shape.items()}), notes
    if not isinstance(mesh, Mapping) or not all(isinstance(name, str) for name in mesh):
        raise TypeError(message("mesh must be a Mesh, an AbstractMesh or a mapping from names to sizes.", got=shown(mesh)))
    for name, size in mesh.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(message(f"mesh axis {name!r} must have an int as its size.", got=shown(size)))
        if size < 1:
            raise ContextError(f"mesh axis {name!r} must have at least one device.", got=shown(size))
    if len(mesh) > _MAX_AXES or math.prod(mesh.values()) > _MAX_DEVICES:
        raise ContextError(
            "The mesh is too large.",
            got=f"{len(mesh)} axes, about 2**{math.prod(mesh.values()).bit_length() - 1} devices",
            need=f"at most {_MAX_AXES} axes, as in JAX, and {_MAX_DEVICES} devices",
        )
    return devices, LogicalMesh.of(dict(mesh)), notes


def _devices(given: Any) -> tuple[Any, ...]:
    """Returns the devices of an array or sequence, which must be different ones."""
    if isinstance(given, str) or not (hasattr(given, "flat") or isinstance(given, Iterable)):
        raise TypeError(message("devices must be a list of devices.", got=shown(given), need="such as jax.devices()"))
    devices = tuple(given.flat) if hasattr(given, "flat") else tuple(given)
    others = [device for device in devices if not (hasattr(device, "platform") and hasattr(device, "device_kind"))]
    if others:
        raise TypeError(message("devices must hold devices of JAX.", got=shown(others[0]), need="such as jax.devices()"))
    if not devices:
        raise ContextError("devices is empty.", need="at least one device")
    if len(set(devices)) < len(devices):
        raise ContextError("devices holds a device twice.", got=f"{len(devices)} devices, of which {len(set(devices))} are different")
    return devices
