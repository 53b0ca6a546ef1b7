"""The compile options of one planned program, be it a step or a part of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from spmdctx.context.state import AutoParallelContext
from spmdctx.cost.price.directives import Directives
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.lowering.compile_options import Options, compile_options
from spmdctx.lowering.scheduler_limit import scheduler_options


class _Planned(Protocol):
    @property
    def plan(self) -> Any: ...

    @property
    def mesh(self) -> LogicalMesh: ...

    @property
    def directives(self) -> Directives: ...


def limit_options(planned: _Planned, devices: Sequence[Any], device_bytes: int | None, budget_bytes: int | None) -> Options:
    """Returns the options that hold a program's schedule to its planned memory; none if the memory of a device is not known."""
    if device_bytes is None:
        return {}
    return scheduler_options(devices[: planned.mesh.num_devices], planned.plan.cost.memory_bytes, device_bytes, budget_bytes)


def fusion_options(planned: _Planned, devices: Sequence[Any], context: AutoParallelContext) -> Options:
    """Returns the options by which the compiler combines a program's collectives as the context says."""
    sums = [row for row in planned.plan.collectives if row.kind in ("reduce_scatter", "all_reduce")]
    largest = max(sums, key=lambda row: (row.kind == "reduce_scatter", row.payload_bytes), default=None)
    ways = 1 if largest is None else planned.mesh.num_slices(largest.axes)
    grouped = bool(planned.directives.groups) or any(one.bucket is not None for one in planned.plan.gradients)
    return compile_options(devices[: planned.mesh.num_devices], context, ways, grouped)
