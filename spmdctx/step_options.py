"""The options of a step: what `parallel` and `plan` take beside the context's options, checked when the step is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from spmdctx._compat import is_compile_only
from spmdctx.context import AutoParallelContext, check_consistency, device_count
from spmdctx.context_options import checked
from spmdctx.context_values import memory_budget
from spmdctx.cost.topology import Topology, as_asked, topology
from spmdctx.errors import ContextError, message
from spmdctx.lowering.xla_options import backend_of
from spmdctx.mesh import LogicalMesh
from spmdctx.planner import Settings
from spmdctx.search.meshes import MAX_AXES
from spmdctx.trace.arguments import Names, Positions

_OWN = ("devices", "mesh", "topology", "memory_bytes", "max_mesh_axes", "strict", "layerwise_parallel")
_ARGUMENTS = ("batch_argnums", "batch_argnames", "static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
_KINDS = (
    ("cpu", "cpu"),
    ("v5 lite", "tpu-v5e"),
    ("v5e", "tpu-v5e"),
    ("v5", "tpu-v5p"),
    ("v6", "tpu-v6e"),
    ("h200", "h200"),
    ("h100", "h100"),
    ("a100", "a100"),
)
_GPUS = ("h100", "h200", "a100")
_PLATFORMS = {"tpu": "tpu-v5p", "gpu": "h100", "cuda": "h100"}


@dataclass(frozen=True)
class StepOptions:
    """Options of one step in normal form; `context` holds the context options that the step sets for itself."""

    context: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[Any, ...] | None = None
    mesh: LogicalMesh | None = None
    topology: Topology | None = None
    memory_bytes: int | None = None
    max_mesh_axes: int | None = None
    strict: bool = False
    layerwise_parallel: tuple[str, ...] = ()
    arguments: Mapping[str, Positions | Names] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def step_options(options: Mapping[str, Any]) -> StepOptions:
    """Checks the options of a step; what is no option of steps must be one of the context.

    Raises:
        ContextError: an unknown name or a bad value.
        TypeError: a value of a wrong type.
    """
    own = {name: value for name, value in options.items() if name in _OWN and value is not None}
    devices, mesh, notes = _devices_and_mesh(own.get("devices"), own.get("mesh"))
    return StepOptions(
        context=checked({name: value for name, value in options.items() if name not in (*_OWN, *_ARGUMENTS)}),
        devices=devices,
        mesh=mesh,
        topology=topology(own["topology"]) if "topology" in own else None,
        memory_bytes=memory_budget(own.get("memory_bytes")),
        max_mesh_axes=_max_mesh_axes(own.get("max_mesh_axes")),
        strict=_boolean("strict", own.get("strict", False)),
        layerwise_parallel=_patterns(own.get("layerwise_parallel", ())),
        arguments={name: value for name, value in options.items() if name in _ARGUMENTS},
        notes=notes,
    )


def _max_mesh_axes(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(message("max_mesh_axes must be an int.", got=repr(value)))
    if not 1 <= value <= MAX_AXES:
        raise ContextError("max_mesh_axes is out of range.", got=str(value), need=f"1 to {MAX_AXES}")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(message(f"{name} must be a bool.", got=repr(value)))
    return value


def _patterns(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(entry, str) for entry in value):
        raise TypeError(message("layerwise_parallel must be a list of path patterns.", got=repr(value)))
    return tuple(value)


def _devices_and_mesh(devices: Any, mesh: Any) -> tuple[tuple[Any, ...] | None, LogicalMesh | None, tuple[str, ...]]:
    if devices is not None and mesh is not None and isinstance(mesh, Mesh):
        raise ContextError("devices and a Mesh with devices of its own are both given.", fix="leave one of the two out")
    if devices is not None:
        devices = tuple(devices.flat) if hasattr(devices, "flat") else tuple(devices)
        if not devices:
            raise ContextError("devices is empty.", need="at least one device")
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
        raise TypeError(message("mesh must be a Mesh, an AbstractMesh or a mapping from names to sizes.", got=repr(mesh)))
    for name, size in mesh.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(message(f"mesh axis {name!r} must have an int as its size.", got=repr(size)))
        if size < 1:
            raise ContextError(f"mesh axis {name!r} must have at least one device.", got=str(size))
    return devices, LogicalMesh.of(dict(mesh)), notes


@dataclass(frozen=True)
class Environment:
    """A step's options resolved against the context and the devices that are there.

    `given_mesh` is the mesh given to the step, whether its mode uses it or not.
    """

    settings: Settings
    devices: tuple[Any, ...]
    notes: tuple[str, ...]
    given_mesh: LogicalMesh | None = None

    @property
    def context(self) -> AutoParallelContext:
        """The context with the step's own options on top."""
        return self.settings.context

    @property
    def backend(self) -> str:
        """The compiler that the plan is for, "cpu", "gpu" or "tpu": the machine's, or the devices' where that is the user's own."""
        machine = self.settings.topology.device.partition("-")[0]
        return {**dict.fromkeys(_GPUS, "gpu"), "tpu": "tpu", "cpu": "cpu"}.get(machine) or backend_of(self.devices)

    @property
    def device_bytes(self) -> int | None:
        """The memory of one of the devices that are compiled for; None where no preset is of their kind."""
        machine, guesses = default_topology(self.devices[0])
        return None if guesses else machine.memory_bytes

    def check_running(self) -> None:
        """Raises ContextError where there are fewer devices than the plan is for, or none that can run."""
        mesh = self.settings.mesh
        if is_compile_only(self.devices[0]):
            raise ContextError(
                f"The devices can be compiled for, but they cannot run: {self.devices[0].device_kind}.",
                fix="use step.plan, step.lower or step.audit; to run, pass devices that are there",
            )
        check_consistency(self.context, len(self.devices), running=True, mesh_devices=None if mesh is None else mesh.num_devices)


def environment(options: StepOptions, context: AutoParallelContext) -> Environment:
    """Resolves devices, mesh and topology, and checks that the options fit together.

    Raises:
        ContextError: options that contradict each other or the devices.
        StrategyError: a dataset_strategy that the devices cannot hold.
        UnsupportedError: a search mode that this version does not have.
    """
    devices = tuple(jax.devices()) if options.devices is None else options.devices
    check_consistency(context, len(devices), mesh_devices=None if options.mesh is None else options.mesh.num_devices)
    if context.parallel_mode == "stand_alone":
        count = 1
    else:
        count = device_count(context, len(devices)) if options.mesh is None else options.mesh.num_devices
    chosen, notes = options.topology, options.notes
    if chosen is None:
        chosen, guess = default_topology(devices[0])
        notes = (*notes, *guess)
    mesh = options.mesh if count > 1 else None
    settings = Settings(
        context=context,
        num_devices=count,
        mesh=mesh,
        topology=as_asked(chosen, context.allows_all_to_all, context.gradient_fp32_sync),
        memory_bytes=options.memory_bytes,
        max_mesh_axes=options.max_mesh_axes,
        strict=options.strict,
        layerwise_parallel=options.layerwise_parallel,
    )
    return Environment(settings, devices, notes, options.mesh)


def default_topology(device: Any) -> tuple[Topology, tuple[str, ...]]:
    """The preset for a device, and a note where it is a guess."""
    kind = str(getattr(device, "device_kind", "cpu")).lower()
    for word, name in _KINDS:
        if word in kind:
            return topology(name), ()
    name = _PLATFORMS.get(str(getattr(device, "platform", "cpu")), "cpu")
    return topology(name), (f"topology: no figures for {kind!r}; those of {name!r} are used.",)
