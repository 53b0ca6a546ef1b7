"""What the bodies of shard_maps cost: one device's own program, priced as a step on one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from spmdctx.cost.collectives import collective_time_s
from spmdctx.cost.topology import Topology
from spmdctx.ir import LOSS_REDUCTION, Assignment, Graph, OpSharding
from spmdctx.mesh import LogicalMesh, replicated
from spmdctx.search.overlap import reduction_machine
from spmdctx.search.price import Bill, price
from spmdctx.search.roofline import local_bytes


class Body(NamedTuple):
    """A body as a graph over one device's shapes; `op` is the op of the step that stands for it, run `repeats` times."""

    op: int
    repeats: int
    graph: Graph
    scopes: tuple[int, ...]
    loose: frozenset[int]


def add_bodies(bill: Bill, graph: Graph, bodies: Iterable[Body], assignment: Assignment, mesh: LogicalMesh, topology: Topology) -> None:
    """Adds to a bill the compute of the bodies, and at their ops the memory that they need beside operands and results."""
    alive = list(bill.memory_profile)
    for body in bodies:
        own = price(body.graph, body.scopes, body.loose, (), _whole(body.graph), _ONE, topology)
        bill.compute_s += own.compute_s * body.repeats
        bill.flops += own.flops * body.repeats * mesh.num_devices
        bill.split_flops += own.flops * body.repeats * mesh.num_devices
        inputs = [body.graph.values[value] for value in body.graph.inputs]
        given = sum(local_bytes(value, replicated(len(value.shape)), _ONE) for value in inputs)
        op = graph.ops[body.op]
        made = sum(local_bytes(graph.values[value], assignment.values[value], mesh) for value in op.results)
        alive[body.op] += max(own.memory_bytes - given - made, 0)
    _combine_reductions(bill, mesh, topology)
    bill.memory_profile, bill.memory_bytes = tuple(alive), max(alive, default=0)


def _combine_reductions(bill: Bill, mesh: LogicalMesh, topology: Topology) -> None:
    """The reductions at the end of a loss are combined where the compiler does so, as those of other gradients are."""
    machine = reduction_machine(True, topology)
    for place, row in enumerate(bill.collectives):
        if row.cause == LOSS_REDUCTION:
            bill.collectives[place] = replace(row, time_s=collective_time_s(row.kind, row.payload_bytes, row.axes, mesh, machine))


_ONE = LogicalMesh.of({"device": 1})


def _whole(graph: Graph) -> Assignment:
    ops = tuple([OpSharding(((),) * len(op.rule.sizes)) for op in graph.ops])
    return Assignment(ops, tuple([replicated(len(value.shape)) for value in graph.values]), "stand_alone")
