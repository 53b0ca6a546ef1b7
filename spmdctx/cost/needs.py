"""Finds what the ops of a step need in an assignment, once for all ops of one kind with the same shardings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from spmdctx.cost.roofline import compute_time_s
from spmdctx.ir.analysis.incidence import ends, executions
from spmdctx.ir.analysis.kinds import op_kinds
from spmdctx.ir.analysis.numbering import Numbering, numbered
from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import Splits, Taken, partial_axes
from spmdctx.ir.sharding import Assignment, AxisNames, TensorSharding
from spmdctx.machine.topology import Topology


class Need(NamedTuple):
    """The needs of ops in a step: operands and results to reshard, axes to reduce over, seconds of compute, and FLOPs.

    `split_flops` are those FLOPs times the fraction of the devices that share them.
    """

    operands: tuple[tuple[int, TensorSharding], ...]
    results: tuple[tuple[int, TensorSharding], ...]
    partial: AxisNames
    compute_s: float
    flops: int
    split_flops: float

    @property
    def communicates(self) -> bool:
        """Returns whether anything is moved or reduced."""
        return bool(self.operands or self.results or self.partial)


class Needs(NamedTuple):
    """The distinct needs of a step's ops (`each`), and the place there of each op's needs (`numbers`)."""

    numbers: IntArray
    each: list[Need]

    def per_op(self, figure: Callable[[Need], float]) -> FloatArray:
        """Returns a figure of each op."""
        return np.array([*map(figure, self.each)], dtype=np.float64)[self.numbers]

    def communicating(self) -> BoolArray:
        """Returns whether each op moves or reduces anything."""
        return np.array([need.communicates for need in self.each], dtype=bool)[self.numbers]


def needs_of(graph: Graph, assignment: Assignment, stored_as: IntArray, splits: Splits, mesh: LogicalMesh, topology: Topology) -> Needs:
    """Returns the needs of all ops in an assignment, which splits them as `splits` says.

    Values with equal numbers in `stored_as` are stored in the same sharding.
    """
    firsts, numbers = _alike(graph, assignment, stored_as).classes()
    ops = [graph.ops[first] for first in firsts]
    return Needs(numbers, [_need(graph, op, splits.taken(op), assignment, mesh, topology) for op in ops])


def _need(graph: Graph, op: Op, taken: Taken, assignment: Assignment, mesh: LogicalMesh, topology: Topology) -> Need:
    axes, stored = assignment.ops[op.id].axes, assignment.values
    operands = [
        (position, wanted)
        for position, (value, wanted) in enumerate(zip(op.operands, taken.operands, strict=True))
        if value != LITERAL and wanted != stored[value]
    ]
    results = [
        (position, natural)
        for position, (value, natural) in enumerate(zip(op.results, taken.results, strict=True))
        if natural != stored[value]
    ]
    flops = op.flops * op.repeats
    # Dimensions of a shard_map's tensors, which are factors of their own, may use an axis many times.
    share = mesh.num_slices(dict.fromkeys([name for own in axes for name in own])) / mesh.num_devices
    compute_s = compute_time_s(graph, op, axes, mesh, topology) * op.repeats
    return Need(tuple(operands), tuple(results), partial_axes(op.rule, axes), compute_s, flops, flops * share)


def _alike(graph: Graph, assignment: Assignment, stored_as: IntArray) -> Numbering:
    """Numbers the ops so that ops with equal numbers have equal needs.

    Such ops have the same kind, run equally often, share the object that says how they are split, and store their values alike.
    """
    found = Numbering(op_kinds(graph).numbers)
    found.refine(executions(graph))
    found.refine(numbered([*map(id, assignment.ops)]))
    # The kind says which operands are literals.
    stored = np.append(stored_as, 0)
    ops, values, places, _, _ = ends(graph)
    for place in range(int(places.max(initial=-1)) + 1):
        here = places == place
        found.refine(stored[values[here]], ops[here])
    return found
