"""Everything that a plan depends on besides the step, and the options of the decorator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdctx.context.layers import AutoParallelContext
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.topology import Topology
from spmdctx.trace.capture.arguments import Names, Positions
from spmdctx.trace.capture.partitioning import AxisRules


@dataclass(frozen=True)
class Settings:
    """Everything but the step that a plan depends on.

    `memory_bytes` is the budget per device, None for no budget; `max_mesh_axes` limits the meshes that a search tries. `rules` are logical
    axis rules in order.
    """

    context: AutoParallelContext
    num_devices: int
    mesh: LogicalMesh | None
    topology: Topology
    memory_bytes: int | None = None
    strict: bool = False
    layerwise_parallel: tuple[str, ...] = ()
    max_mesh_axes: int | None = None
    rules: AxisRules = ()


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
    rules: AxisRules = ()
    arguments: Mapping[str, Positions | Names] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
