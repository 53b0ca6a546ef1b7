"""Prices the bodies of shard_maps: each is one device's own program, priced as a step on one device."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from spmdctx.cost.bill import Bill
from spmdctx.cost.memory.lives import compiled_memory
from spmdctx.cost.price import price
from spmdctx.cost.price.assigned import Step
from spmdctx.cost.price.peak import set_peak
from spmdctx.ir.collective import CauseForm
from spmdctx.ir.graph import Graph, Op, item_bytes
from spmdctx.ir.mesh import LogicalMesh, axes_of, replicated
from spmdctx.ir.projection import local_bytes
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.collectives.combining import reduction_machine


class Body(NamedTuple):
    """A shard_map's body as a graph over one device's shapes; the op `op` of the step stands for it and runs `repeats` times."""

    op: int
    repeats: int
    graph: Graph
    scopes: tuple[int, ...]
    from_literals: frozenset[int]


def add_bodies(bill: Bill, graph: Graph, bodies: Iterable[Body], assignment: Assignment, mesh: LogicalMesh, topology: Topology) -> None:
    """Adds to a bill the compute of the bodies and, at their ops, the memory that they need beside operands and results."""
    alive = list(bill.memory_profile)
    for body in bodies:
        own = price(Step(body.graph, body.scopes, body.from_literals), _whole(body.graph), _ONE, topology)
        bill.compute_s += own.compute_s * body.repeats
        bill.flops += own.flops * body.repeats * mesh.num_devices
        bill.split_flops += own.flops * body.repeats * mesh.num_devices
        op = graph.ops[body.op]
        gathered = _gathered(bill, graph, op, mesh)
        made = sum(local_bytes(graph.values[value], assignment.values[value], mesh) for value in op.results)
        alive[body.op] += max(_own_peak(body, own, gathered, topology) - made, 0) - sum(gathered.values())
    _combine_reductions(bill, mesh, topology)
    set_peak(bill, alive, topology)


def _gathered(bill: Bill, graph: Graph, op: Op, mesh: LogicalMesh) -> dict[int, int]:
    """Returns the gathered bytes of the operands that are gathered for an op, by operand position."""
    targets = {row.value: row.target for row in bill.moves if row.op == op.id and len(axes_of(row.target)) < len(axes_of(row.source))}
    found = [(position, graph.values[value], targets[value]) for position, value in enumerate(op.operands) if value in targets]
    return {position: local_bytes(value, target, mesh) for position, value, target in found}


def _own_peak(body: Body, own: Bill, gathered: Collection[int], topology: Topology) -> int:
    """Returns the peak bytes that a body needs beside its inputs.

    An input in `gathered` counts from its first read to its last. It counts in a narrower type if all its readers first cast it to one.
    """
    graph, alive = body.graph, np.array(own.memory_profile, dtype=np.int64)
    memory = compiled_memory(graph, body.scopes, frozenset(), topology.compiler, is_split=False)
    reads = {read.value: read for read in memory.reads}
    for position, value in enumerate(graph.inputs):
        known = graph.values[value]
        size = local_bytes(known, replicated(len(known.shape)), _ONE)
        alive -= size
        if position in gathered and value in reads:
            _, start, end = reads[value]
            alive[start : end + 1] += (
                size * _read_bytes(graph, value) // item_bytes(known.dtype) if topology.compiler.narrows_matrix_operands else size
            )
    return int(alive.max(initial=0))


def _read_bytes(graph: Graph, value: int) -> int:
    """Returns the bytes of one item of a value as its readers take it; fewer if all of them first cast it."""
    read_as = [reader.results[0] if reader.primitive == "convert_element_type" else value for reader in graph.readers[value]]
    return max(item_bytes(graph.values[one].dtype) for one in read_as)


def _combine_reductions(bill: Bill, mesh: LogicalMesh, topology: Topology) -> None:
    """Prices the reductions at the end of a loss like those of other gradients, which the compiler may combine."""
    machine = reduction_machine(True, topology)
    for place, row in enumerate(bill.collectives):
        if row.cause.form is CauseForm.LOSS:
            bill.collectives[place] = replace(row, time_s=collective_time_s(row.kind, row.payload_bytes, row.axes, mesh, machine))


_ONE = LogicalMesh.of({"device": 1})


def _whole(graph: Graph) -> Assignment:
    ops = tuple([OpSharding(((),) * len(op.rule.sizes)) for op in graph.ops])
    return Assignment(ops, tuple([replicated(len(value.shape)) for value in graph.values]), "stand_alone")
