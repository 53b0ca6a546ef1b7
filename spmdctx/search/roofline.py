"""One device's share of an op: its bytes, and the seconds it computes."""

from __future__ import annotations

from spmdctx.cost.topology import Topology
from spmdctx.ir import LITERAL, Graph, Op, TensorSharding, Value, item_bytes
from spmdctx.mesh import LogicalMesh, local_shape
from spmdctx.search.transfer import FactorAxes, project


def local_bytes(value: Value, sharding: TensorSharding, mesh: LogicalMesh) -> int:
    """Bytes of one device's block of a value."""
    count = item_bytes(value.dtype)
    for size in local_shape(value.shape, sharding, mesh):
        count *= size
    return count


def compute_time_s(graph: Graph, op: Op, axes: FactorAxes, mesh: LogicalMesh, topology: Topology) -> float:
    """Roofline of one execution: FLOPs against the peak, bytes against the memory's bandwidth."""
    slices = mesh.num_slices(name for own in axes for name in own)
    moved = 0
    for side, tensors in ((op.rule.operands, op.operands), (op.rule.results, op.results)):
        for dims, value in zip(side, tensors, strict=True):
            if value != LITERAL:
                moved += local_bytes(graph.values[value], project(dims, axes), mesh)
    return max(op.flops / slices / topology.peak_flops_per_s, moved / topology.memory_bytes_per_s)
