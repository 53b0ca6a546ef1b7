"""Finds shardings through which several matrix products of one computation get the same value.

The products that do not take the value as it is stored share one copy of it on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spmdctx.ir.domain import MAX_ORDERED_AXES, domain
from spmdctx.ir.graph import LITERAL, Graph, Value, item_bytes
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import Splits
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.machine.reshard import reshard_time_s
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.narrowing import sharing_ops

Routes = Mapping[tuple[int, int], TensorSharding]
"""The sharding through which a value gets to its products, by computation and value."""

_WORTH_IT = 1 - 1e-9


def shared_reads(graph: Graph, scopes: Sequence[int], assignment: Assignment, mesh: LogicalMesh, topology: Topology) -> Routes:
    """Returns the values that reach several products at less cost by way of one more sharding, or of one that some reader takes.

    Args:
        graph: the step.
        scopes: per op the computation that it belongs to.
        assignment: its shardings.
        mesh: the mesh.
        topology: the machine.
    """
    wanted: dict[tuple[int, int], list[TensorSharding]] = {}
    splits = Splits(assignment)
    for op in sharing_ops(graph):
        for value, taken in zip(op.operands, splits.taken(op).operands, strict=True):
            if value != LITERAL:
                wanted.setdefault((scopes[op.id], value), []).append(taken)
    routes = {}
    known: dict[tuple[object, ...], TensorSharding] = {}
    for key, ways in wanted.items():
        own, stored = graph.values[key[1]], assignment.values[key[1]]
        targets = tuple(dict.fromkeys(target for target in ways if target != stored))
        if len(ways) < 2 or not targets:
            continue
        alike = (own.shape, own.dtype, stored, targets)
        if alike not in known:
            known[alike] = _best(own, stored, targets, mesh, topology)
        if known[alike] != stored:
            routes[key] = known[alike]
    return routes


def _best(
    known: Value, stored: TensorSharding, targets: tuple[TensorSharding, ...], mesh: LogicalMesh, topology: Topology
) -> TensorSharding:
    """Returns the sharding of the shared copy, or the stored one if no copy is cheaper."""
    narrow = topology.compiler.narrows_matrix_operands and known.dtype == "float32"
    size = item_bytes("bfloat16" if narrow else known.dtype)

    def seconds(via: TensorSharding) -> float:
        first = reshard_time_s(known.shape, size, stored, via, mesh, topology)
        return first + sum(reshard_time_s(known.shape, size, via, target, mesh, topology) for target in targets)

    best, least_s = stored, seconds(stored) * _WORTH_IT
    for via in _candidates(known, targets, mesh):
        if (own_s := seconds(via)) < least_s * _WORTH_IT:
            best, least_s = via, own_s
    return best


def _candidates(known: Value, targets: tuple[TensorSharding, ...], mesh: LogicalMesh) -> Iterable[TensorSharding]:
    return targets if len(mesh.axes) > MAX_ORDERED_AXES else (*targets, *domain(mesh, known.shape).shardings)
