"""The number of pipeline stages that recursive_programming would use: as few as fit.

With `s` stages a device holds the stored tensors of 1 / s of the layers. Tensors that the plan splits already are then spread over s
times fewer devices. So only the tensors that every device holds whole get smaller:

    bytes(s) = whole / s + the rest of the plan's peak

From the user's pipeline_stages on, the count is halved while 1.1 bytes(s / 2) stays below the capacity (MindSpore,
auto_parallel/stage_compute.cc, which estimates the bytes of a transformer by the names of its parameters instead).
"""

from __future__ import annotations

import logging

from spmdctx.ir.graph import Graph, Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import local_bytes
from spmdctx.ir.sharding import Assignment

LOG = logging.getLogger("spmdctx")
_MARGIN = 1.1


def suggest_stages(graph: Graph, assignment: Assignment, mesh: LogicalMesh, peak_bytes: int, most: int, capacity_bytes: int) -> int:
    """Suggests a number of stages, and logs it at level INFO.

    Args:
        graph: the step.
        assignment: its plan without a pipeline.
        mesh: the mesh of the plan.
        peak_bytes: the plan's peak per device.
        most: the user's pipeline_stages.
        capacity_bytes: the bytes that a device may hold.
    """
    whole = sum(
        local_bytes(graph.values[value], assignment.values[value], mesh)
        for value in graph.inputs
        if graph.values[value].role in (Role.PARAMETER, Role.OPTIMIZER) and not any(assignment.values[value])
    )
    stages = most
    while stages % 2 == 0 and _MARGIN * _bytes(whole, peak_bytes, stages // 2) < capacity_bytes:
        stages //= 2
    LOG.info(
        "auto_pipeline suggests %d pipeline stages (at most %d): %d bytes per device of %d",
        stages,
        most,
        _bytes(whole, peak_bytes, stages),
        capacity_bytes,
    )
    return stages


def _bytes(whole: int, peak_bytes: int, stages: int) -> int:
    return peak_bytes - whole + -(-whole // stages)
