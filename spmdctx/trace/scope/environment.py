"""The environment of a step: the settings, devices and notes with which it is planned and run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from spmdctx._compat import is_compile_only
from spmdctx.context.layers import AutoParallelContext, check_consistency, device_count
from spmdctx.errors import ContextError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.devices import backend_of, default_topology
from spmdctx.machine.topology import Preferences, as_asked
from spmdctx.trace.scope.rules import mesh_for_rules
from spmdctx.trace.scope.settings import Settings, StepOptions

_GPUS = ("h100", "h200", "a100")


@dataclass(frozen=True)
class Environment:
    """A step's options resolved against the context and the devices that are there.

    `given_mesh` is the mesh given to the step, whether its mode uses it or not. `warnings` are said at the first call.
    """

    settings: Settings
    devices: tuple[Any, ...]
    notes: tuple[str, ...]
    given_mesh: LogicalMesh | None = None
    warnings: tuple[str, ...] = ()

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
    given = options.mesh if count == 1 or not options.rules else mesh_for_rules(options.rules, options.mesh, count)
    mesh = given if count > 1 else None
    settings = Settings(
        context=context,
        num_devices=count,
        mesh=mesh,
        topology=as_asked(chosen, Preferences(context.allows_all_to_all, context.gradient_fp32_sync)),
        memory_bytes=options.memory_bytes,
        max_mesh_axes=options.max_mesh_axes,
        strict=options.strict,
        layerwise_parallel=options.layerwise_parallel,
        rules=options.rules,
    )
    return Environment(settings, devices, notes, given, _not_parallel(options, context, len(devices), count))


def _not_parallel(options: StepOptions, context: AutoParallelContext, available: int, count: int) -> tuple[str, ...]:
    """Returns why a step is not parallel, unless the user asked for one device."""
    if count > 1 or options.mesh is not None or options.devices is not None or context.is_set("device_num"):
        return ()
    if context.parallel_mode != "stand_alone":
        return (f"There is one device: parallel_mode {context.parallel_mode!r} splits nothing.",)
    if context.is_set("parallel_mode"):
        return ()
    idle = f"{available - 1} of {available} devices are idle: " if available > 1 else ""
    return (
        f"{idle}the step is not parallel, as no parallel_mode is set. Set one, such as parallel_mode='auto_parallel', "
        "or parallel_mode='stand_alone' for one device without this warning.",
    )
