"""Prices an assignment op by op."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spmdctx.cost.bill import Bill
from spmdctx.cost.needs import Need, Needs, needs_of
from spmdctx.cost.price.assigned import Assigned, Step
from spmdctx.cost.price.collected import Collected
from spmdctx.cost.price.directives import Directives, priced_directives
from spmdctx.cost.price.memory import MemoryCount
from spmdctx.cost.price.moves import Move, Moves
from spmdctx.cost.price.reductions import Reductions
from spmdctx.ir.analysis.kinds import of_primitives
from spmdctx.ir.analysis.repeats import made_repeats, read_repeats
from spmdctx.ir.arrays import FloatArray
from spmdctx.ir.collective import Collective
from spmdctx.ir.graph import Op
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.primitives import ADDITIONS
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.partial_sums import Readers
from spmdctx.machine.xla.partitioner.callbacks import broadcasts


def price(
    step: Step,
    assignment: Assignment,
    mesh: LogicalMesh,
    topology: Topology,
    directives: Directives | None = None,
    written: Iterable[Collective] = (),
) -> Bill:
    """Returns the bill of an assignment.

    Args:
        step: the step.
        assignment: a sharding for each of its ops and values.
        mesh: the mesh.
        topology: the machine.
        directives: what the program says besides shardings; if None, nothing is in a bucket, and sums of loops wait where they can.
        written: the collectives that the user wrote into the program.
    """
    assigned = Assigned(step, assignment, mesh, topology)
    bill = _Biller(assigned, directives or priced_directives(assigned)).bill()
    for row in (*broadcasts(step.graph, mesh), *written):
        time_s = collective_time_s(row.kind, row.payload_bytes, row.axes, mesh, topology)
        bill.collectives.append(Collective(row.kind, row.axes, row.payload_bytes, time_s, row.repeats, row.cause, row.source))
        bill.shares.append(0.0)
    return bill


class _Biller:
    def __init__(self, assigned: Assigned, directives: Directives) -> None:
        self._assigned, self._directives, self._stored_as = assigned, directives, assigned.stored_as()
        self._readers = Readers(assigned.graph, assigned.assignment)
        self._collected = Collected(assigned)
        self._memory = MemoryCount(assigned, directives, self._stored_as)
        self._moves = Moves(assigned, directives, self._collected, self._memory)
        self._reductions = Reductions(assigned, directives, self._readers, self._collected, self._memory)

    def bill(self) -> Bill:
        """Returns the bill of all ops."""
        assigned = self._assigned
        needs = needs_of(assigned.graph, assigned.assignment, self._stored_as, self._readers.splits, assigned.mesh, assigned.topology)
        self._communicate(needs)
        self._reductions.settle()
        rows, shares = self._collected.rows, self._collected.shares
        bill = Bill(
            collectives=rows,
            shares=shares,
            moves=self._moves.rows,
            crossed=tuple(self._reductions.crossed),
            compute_s=self._compute_s(needs),
            hidden_communication_s=sum(row.time_s * row.repeats * share for row, share in zip(rows, shares, strict=True)),
            flops=_sum_in_order(needs.per_op(lambda need: need.flops)),
            split_flops=_sum_in_order(needs.per_op(lambda need: need.split_flops)),
        )
        self._memory.count(bill, self._collected.ops)
        return bill

    def _communicate(self, needs: Needs) -> None:
        """Adds what all ops communicate."""
        graph, producers = self._assigned.graph, self._assigned.graph.producers
        billed = needs.communicating()
        if self._reductions.joins_terms:
            billed |= of_primitives(graph, ADDITIONS)
        billed[[producers[value] for value in self._directives.loop_sums.totals if value in producers]] = True
        for index in np.flatnonzero(billed).tolist():
            self._add(graph.ops[index], needs.each[needs.numbers[index]])

    def _add(self, op: Op, need: Need) -> None:
        """Adds what one op communicates."""
        assigned, topology = self._assigned, self._assigned.topology
        for position, target in need.operands:
            value = op.operands[position]
            if value not in assigned.step.from_literals:
                narrow = topology.compiler.narrows_matrix_operands and self._readers.are_matrix_products(value, target)
                source, repeats = assigned.assignment.values[value], read_repeats(assigned.graph, op)
                self._moves.add(Move(op, value, source, target, narrow, repeats, position))
        self._reductions.join_terms(op, need)
        if need.partial or need.results:
            self._finish(op, need)
        for value in op.results:
            self._reductions.reduce_total(op, value)

    def _finish(self, op: Op, need: Need) -> None:
        """Adds the reductions of an op's results, and their moves into the shardings in which they are stored."""
        assigned, topology = self._assigned, self._assigned.topology
        for value, made in zip(op.results, self._readers.splits.taken(op).results, strict=True):
            stored = assigned.assignment.values[value]
            natural = self._reductions.reduce(op, value, made, need) if need.partial else made
            if natural != stored and value not in assigned.step.from_literals:
                if natural != made or not need.partial:
                    self._memory.copies.pass_on(op, value, assigned.stored_bytes(value, natural))
                narrow = topology.compiler.narrows_matrix_operands and self._readers.are_matrix_products(value)
                self._moves.add(Move(op, value, natural, stored, narrow, made_repeats(assigned.graph, op)))

    def _compute_s(self, needs: Needs) -> float:
        """Returns the seconds in which all ops compute, and in which they write values in order to move them."""
        graph, producers, from_literals = self._assigned.graph, self._assigned.graph.producers, self._assigned.step.from_literals
        own = needs.per_op(lambda need: need.compute_s)
        makers = [maker for maker in map(producers.get, from_literals) if maker is not None]
        # Values that depend on no input are computed inside their readers' fusions.
        own[[maker for maker in makers if from_literals.issuperset(graph.ops[maker].results)]] = 0
        ops, seconds = self._moves.written(self._reductions.scattered)
        return _sum_in_order(np.insert(own, [op + 1 for op in ops], seconds))


def _sum_in_order(figures: FloatArray) -> float:
    """Returns the sum from first to last; other orders round differently."""
    return float(np.add.accumulate(figures)[-1]) if len(figures) else 0.0
