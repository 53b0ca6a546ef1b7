"""What an assignment costs: every collective it implies, with its cause; compute and peak memory. Knows no search.

A reshard is done once per computation (top level, loop body, remat body) however many ops read the result, as the compiler
merges equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from spmdctx.cost.bill import Bill, Moved
from spmdctx.cost.memory.copies import Copies
from spmdctx.cost.memory.early_updates import Late, early_updates
from spmdctx.cost.memory.lives import StepMemory, profile, step_memory
from spmdctx.cost.needs import Need, needs_of
from spmdctx.cost.roofline import passing_values, written_s
from spmdctx.cost.shared_reads import Routes, shared_reads
from spmdctx.ir.analysis.kinds import of_primitives, ops_of, value_kinds
from spmdctx.ir.analysis.loop_sums import NO_HOLDS, Holds, reduced_dtype
from spmdctx.ir.analysis.numbering import Numbering, numbered
from spmdctx.ir.analysis.repeats import made_repeats, read_repeats
from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.ir.collective import Cause, Collective
from spmdctx.ir.graph import LITERAL, Graph, Op, item_bytes
from spmdctx.ir.mesh import LogicalMesh, format_sharding, local_shape
from spmdctx.ir.primitives import ADDITIONS, IDENTITIES
from spmdctx.ir.projection import local_bytes
from spmdctx.ir.sharding import Assignment, AxisNames, TensorSharding
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.reshard import ReshardStep, reshard_steps
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.late_products import GradientProduct
from spmdctx.machine.xla.narrowing import sharers
from spmdctx.machine.xla.overlap import sides
from spmdctx.machine.xla.partial_sums import Readers, Sums
from spmdctx.machine.xla.reductions import reduction_plan, scattered_by
from spmdctx.machine.xla.update_fusion import gradient_apart


def price(
    graph: Graph,
    scopes: Iterable[int],
    loose: frozenset[int],
    manual: Iterable[Collective],
    assignment: Assignment,
    mesh: LogicalMesh,
    topology: Topology,
    donated: frozenset[int] = frozenset(),
    buckets: Mapping[int, int] = MappingProxyType({}),
    holds: Holds = NO_HOLDS,
) -> Bill:
    """Prices an assignment.

    `manual` are the collectives that the user wrote himself, `donated` inputs lend their memory, `buckets` says of sums that make up
    gradients in which bucket they are reduced, `holds` what loops add up and leave unreduced until it is complete.
    """
    scopes = tuple(scopes)
    memory = step_memory(graph, scopes, donated, waits=mesh.num_devices > 1, fuses_into_products=topology.compiler.fuses_into_products)
    biller = _Biller(graph, loose, assignment, mesh, topology, memory)
    biller.buckets, biller.holds = buckets, holds
    biller.routes = shared_reads(graph, scopes, assignment, mesh, topology)
    biller.add_all(scopes)
    biller.settle_sums()
    biller.add_up()
    bill = biller.bill
    bill.hidden_communication_s = sum(row.time_s * row.repeats * share for row, share in zip(bill.collectives, biller.shares, strict=True))
    for row in manual:
        time_s = collective_time_s(row.kind, row.payload_bytes, row.axes, mesh, topology)
        bill.collectives.append(Collective(row.kind, row.axes, row.payload_bytes, time_s, row.repeats, row.cause, row.source))
    bill.shares = [*biller.shares, *[0.0] * (len(bill.collectives) - len(biller.shares))]
    biller.count_memory(scopes)
    return bill


class _Written(NamedTuple):
    """An op has a value moved that is only computed on the way, and written for that so many times a step."""

    op: int
    value: int
    source: TensorSharding
    target: TensorSharding
    repeats: int


class _Biller:
    def __init__(
        self, graph: Graph, loose: frozenset[int], assignment: Assignment, mesh: LogicalMesh, topology: Topology, memory: StepMemory
    ) -> None:
        self.copies, self._memory = Copies(graph, memory), memory
        self.reduced: set[int] = set()
        self.buckets: Mapping[int, int] = {}
        self.holds = NO_HOLDS
        self.routes: Routes = MappingProxyType({})
        self._sharers = sharers(graph)
        self.graph, self.loose, self.assignment, self.mesh, self.topology = graph, loose, assignment, mesh, topology
        self.bill = Bill()
        self.shares: list[float] = []
        # The machine by which each collective was priced.
        self._machines: list[Topology] = []
        self._sides, self._passing = sides(graph), passing_values(graph)
        # What is only computed on the way and moved: it is written before.
        self._written: list[_Written] = []
        # Sums that are reduce-scattered, and the slice that is left of each.
        self._scattered: dict[int, TensorSharding] = {}
        # Seconds of each op's computation.
        self._compute_s: FloatArray = np.zeros(0)
        self._stored: dict[tuple[object, ...], int] = {}
        self._done: set[tuple[object, ...]] = set()
        self._same = _aliases(graph)
        self._stored_as = numbered([*map(id, assignment.values)])
        self._readers = Readers(graph, assignment)
        self._sums = Sums(self._readers, assignment, mesh, topology) if topology.compiler.merges_partial_sums else None

    def add_all(self, scopes: Sequence[int]) -> None:
        """Adds what all ops cost."""
        graph, producers = self.graph, self.graph.producers
        needs = needs_of(graph, self.assignment, self._stored_as, self._readers.splits, self.mesh, self.topology)
        billed = needs.communicating()
        if self._sums:
            billed |= of_primitives(graph, ADDITIONS)
        billed[[producers[value] for value in self.holds.totals if value in producers]] = True
        for index in np.flatnonzero(billed).tolist():
            self._add(graph.ops[index], scopes[index], needs.each[needs.numbers[index]])
        self._compute_s = needs.per_op(lambda need: need.compute_s)
        # What depends on no input is computed on the way into its readers.
        self._compute_s[
            [maker for maker in map(producers.get, self.loose) if maker is not None and self.loose.issuperset(graph.ops[maker].results)]
        ] = 0
        self.bill.flops = _sum_in_order(needs.per_op(lambda need: need.flops))
        self.bill.split_flops = _sum_in_order(needs.per_op(lambda need: need.split_flops))

    def _add(self, op: Op, scope: int, need: Need) -> None:
        """Adds what one op communicates."""
        for value_position, target in need.operands:
            value = op.operands[value_position]
            if value not in self.loose:
                source = self.assignment.values[value]
                narrow = self.topology.compiler.narrows_matrix_operands and self._readers.are_matrix_products(value, target)
                self._move(op, scope, value, source, target, value_position, narrow, read_repeats(self.graph, op))
        if self._sums and op.primitive in ADDITIONS and not need.operands and not need.partial:
            self._join_terms(self._sums, op)
        if need.partial or need.results:
            self._finish(op, scope, need)
        if self.holds.totals:
            for value in op.results:
                if value in self.holds.totals:
                    self._reduce_total(op, value)

    def _reduce_total(self, op: Op, value: int) -> None:
        """What a loop has added up, unreduced, is complete."""
        graph, stored = self.graph, self.assignment.values[value]
        axes, repeats, terms = self.holds.totals[value]
        makers = [(term, graph.ops[graph.producers[term]]) for term in terms]
        widened = {term for term, maker in makers if self._sides.widening(maker, term, graph.values[term].dtype, self.topology) > 1}
        sizes = [item_bytes(dtype) for dtype in (graph.values[value].dtype, reduced_dtype(graph, value, terms, widened))]
        payload = self._bytes(value, stored) // sizes[0] * sizes[1]
        bucket = next((self.buckets[term] for term in terms if term in self.buckets), None)
        cause = Cause.sum(makers[0][1].primitive, bucket, in_loop=True)
        hides = self._sides.reduction_share(value, self.topology), self._sides.reduction_machine(value, self.topology)
        self._collect("all_reduce", axes, payload, op, cause, *hides, repeats=repeats)
        if self._sums:
            self._sums.reduced(value, len(self.bill.collectives) - 1, stored)

    def _join_terms(self, sums: Sums, op: Op) -> None:
        """A sum of two reduced values is reduced once, after it."""
        places = sums.terms(op)
        if places is not None:
            first, second = (self.bill.collectives[place] for place in places)
            # One reduction over the same devices, in whatever order their axes are.
            if {*first.axes} == {*second.axes} and first.repeats == second.repeats == op.repeats:
                sums.join(op, *places)

    def settle_sums(self) -> None:
        """Takes joined all_reduces out of the bill, and makes reduce_scatters of those that are only sliced."""
        if self._sums is None:
            return
        rows = self.bill.collectives
        for cut in self._sums.slices():
            row = rows[cut.place]
            if cut.axes and set(cut.axes) == {name for name in row.axes if self.mesh.sizes[name] > 1}:
                order = () if cut.place in self._sums.added else row.axes
                kind = self._scattered_by(cut.value, row.payload_bytes, order, cut.whole, cut.kept)
                time_s = collective_time_s(kind, row.payload_bytes, cut.axes, self.mesh, self._machines[cut.place])
                rows[cut.place] = replace(row, kind="reduce_scatter", axes=cut.axes, time_s=time_s)
                self._scattered[cut.value] = cut.kept
        kept = [place for place in range(len(rows)) if place not in self._sums.joined]
        self.bill.collectives, self.shares = [rows[place] for place in kept], [self.shares[place] for place in kept]

    def add_up(self) -> None:
        """Adds up what all ops compute, and what they write to have it moved.

        A sum that is scattered is written as its slice, by the collective; what moves on from there is written once more.
        """
        places, added = [one.op + 1 for one in self._written], [self._writing_s(one) for one in self._written]
        self.bill.compute_s = _sum_in_order(np.insert(self._compute_s, places, added))

    def _writing_s(self, one: _Written) -> float:
        source = self._scattered.get(one.value, one.source)
        return 0.0 if source == one.target else written_s(self.graph.values[one.value], source, self.mesh, self.topology) * one.repeats

    def _finish(self, op: Op, scope: int, need: Need) -> None:
        for position, value in enumerate(op.results):
            natural = self._readers.splits.taken(op).results[position]
            stored = self.assignment.values[value]
            unreduced: TensorSharding | None = natural if need.partial else None
            if need.partial and op.rule.combiner in ("argmax", "argmin"):
                self._keep_unreduced(op, value, natural, in_place=False, scattered=False)
                self._gather_candidates(op, value, natural, need.partial)
            elif need.partial:
                held = self.holds.axes.get(value, ())
                plan = reduction_plan(op, natural, stored, tuple([name for name in need.partial if name not in held]))
                payload = self._bytes(value, natural) * self._sides.widening(op, value, self.graph.values[value].dtype, self.topology)
                cause = Cause.sum(op.primitive, self.buckets.get(value))
                hides = self._sides.reduction_share(value, self.topology), self._sides.reduction_machine(value, self.topology)
                in_place = (
                    self.copies.is_made_in_place(value) and natural == plan.after and natural == stored and not self._is_narrow(value)
                )
                if self.mesh.num_slices((*plan.scattered, *plan.reduced)) > 1:
                    self._keep_unreduced(op, value, natural, in_place=in_place, scattered=bool(plan.scattered))
                if plan.scattered:
                    priced = self._scattered_by(value, payload, need.partial, natural, plan.after)
                    self._collect("reduce_scatter", plan.scattered, payload, op, cause, *hides, priced=priced)
                    payload //= self.mesh.num_slices(plan.scattered)
                if plan.reduced:
                    self._collect("all_reduce", plan.reduced, payload, op, cause, *hides)
                    # Rows outside of the table are masked after the reduction of a gather.
                    direct = op.primitive != "gather" or self.topology.compiler.sinks_slices
                    if self._sums and direct and not plan.scattered:
                        self._sums.reduced(value, len(self.bill.collectives) - 1, plan.after)
                natural = plan.after
            if natural != stored and value not in self.loose:
                if natural != unreduced:
                    self.copies.pass_on(op, value, self._stored_bytes(value, natural))
                narrow = self.topology.compiler.narrows_matrix_operands and self._readers.are_matrix_products(value)
                self._move(op, scope, value, natural, stored, None, narrow, made_repeats(self.graph, op))

    def _keep_unreduced(self, op: Op, value: int, natural: TensorSharding, *, in_place: bool, scattered: bool) -> None:
        """A partial result is in memory until it is reduced: a gradient that a loop makes until the end of the turn, with others.

        One that is reduced `in_place` takes no more than it is wider than what it becomes.
        """
        is_gradient = bool(self._sides.terminal[value])
        widening = self._sides.widening(op, value, self.graph.values[value].dtype, self.topology)
        combined = is_gradient and self.topology.compiler.combines_reductions
        size = self._stored_bytes(value, natural)
        self.copies.keep(op, value, size * (widening - in_place), to_the_end=combined, put_off=is_gradient and scattered)
        self.reduced.add(op.id)
        if in_place:
            self.copies.reduce_in_place(op, size)

    def _gather_candidates(self, op: Op, value: int, natural: TensorSharding, partial: AxisNames) -> None:
        """XLA gathers every device's best value and its index, and compares them."""
        slices = self.mesh.num_slices(partial)
        for dtype in (self.graph.values[op.operands[0]].dtype, self.graph.values[value].dtype):
            payload = self._bytes(value, natural) // item_bytes(self.graph.values[value].dtype) * item_bytes(dtype) * slices
            share = self._sides.reduction_share(value, self.topology)
            self._collect("all_gather", partial, payload, op, Cause.sum(op.primitive), share)

    def _scattered_by(self, value: int, payload: int, partial: AxisNames, whole: TensorSharding, kept: TensorSharding) -> str:
        """The kind of collective that the compiler makes of a reduce_scatter of `payload` bytes."""
        shape = self.graph.values[value].shape
        size = payload // max(1, math.prod(local_shape(shape, whole, self.mesh)))
        return scattered_by(shape, size, partial, whole, kept, self.mesh, self.topology)

    def _move(
        self,
        op: Op,
        scope: int,
        value: int,
        source: TensorSharding,
        target: TensorSharding,
        position: int | None,
        narrow: bool,
        repeats: int,
    ) -> None:
        """Adds the collectives that bring a value to an op, as its operand at `position`, or from it (None)."""
        known = self.graph.values[value]
        time_s, current = 0.0, source
        share = self._sides.gather_share(value, self.topology)
        size = item_bytes("bfloat16" if narrow else known.dtype)
        all_to_all = self.topology.preferences.allows_all_to_all
        direct = reshard_steps(known.shape, size, source, target, self.mesh, all_to_all)
        steps, via = direct, self.routes.get((scope, value)) if self._sharers[op.id] and position is not None else None
        if via is not None:
            first = reshard_steps(known.shape, size, source, via, self.mesh, all_to_all)
            steps = (*first, *reshard_steps(known.shape, size, via, target, self.mesh, all_to_all))
        if self._passing[value] and (scope, self._same[value], source, steps[0].sharding) not in self._done:
            self._written.append(_Written(op.id, value, source, target, repeats or op.repeats))
        for step in steps:
            key = (scope, self._same[value], current, step.sharding)
            if step.kind != "slice" and key not in self._done:
                cause = Cause.move(position, op.primitive, known.path, format_sharding(current), format_sharding(step.sharding))
                time_s += self._collect(step.kind, step.axes, step.payload_bytes, op, cause, share, repeats=repeats)
            self._done.add(key)
            current = step.sharding
        self._copy(op, scope, value, source, direct, narrow, is_result=position is None)
        self.bill.moves.append(Moved(value, source, target, op.id, time_s))

    def _copy(
        self, op: Op, scope: int, value: int, current: TensorSharding, steps: Sequence[ReshardStep], narrow: bool, *, is_result: bool
    ) -> None:
        """The copies that are in memory on the way of a value to an op, or from it; as if no other op shared them."""
        gathered, last = None, max((place for place, step in enumerate(steps) if step.kind != "slice"), default=0)
        for place, step in enumerate(steps):
            key = (scope, self._same[value], current, step.sharding)
            if step.kind == "slice":
                if gathered is not None and (is_result or op.primitive in IDENTITIES):
                    self.copies.slice_of(gathered, value if is_result else op.results[0])
            elif not (step.sharding == self.assignment.values[value] and self.copies.is_held(value)):
                size = self._stored_bytes(value, step.sharding, narrow)
                if is_result and self.copies.is_held(value):
                    self.copies.make_after(op, key, size)
                elif place < last:
                    self.copies.pass_through(op, key, size)
                else:
                    self.copies.make(op, value, key, size, gathered=step.kind == "all_gather" and self.topology.compiler.gather_overlap > 0)
                gathered = key if step.kind == "all_gather" else None
            current = step.sharding

    def _collect(
        self,
        kind: str,
        axes: AxisNames,
        payload: int,
        op: Op,
        cause: Cause,
        share: float = 0.0,
        machine: Topology | None = None,
        repeats: int = 0,
        priced: str = "",
    ) -> float:
        machine, repeats = machine or self.topology, repeats or op.repeats
        time_s = collective_time_s(priced or kind, payload, axes, self.mesh, machine)
        self._machines.append(machine)
        self.bill.collectives.append(Collective(kind, axes, payload, time_s, repeats, cause, self.graph.origins[op.id].source))
        self.shares.append(share)
        return time_s * repeats

    def count_memory(self, scopes: Sequence[int]) -> None:
        """What is alive at each op, and which updates the step waits for, when every op is known."""
        graph, memory, scratch_bytes = self.graph, self._memory, self.topology.compiler.scratch_bytes
        sizes, moved = self.sizes(), {row.value for row in self.bill.moves}

        def alive_with(late: Mapping[int, GradientProduct]) -> IntArray:
            return profile(memory.lives, sizes, len(graph.ops), self.copies.finish(moved, sizes, late), scratch_bytes)

        def fuses(op: Op) -> bool:
            return gradient_apart(graph, self.assignment, self.mesh, scratch_bytes, op) is None

        products = self.copies.late(moved, self.reduced, sizes)
        late = Late(products, alive_with(products), alive_with, partial(self.copies.waiting, sizes), fuses)
        waits = self.topology.compiler.runs_barriers_in_order
        self.bill.early, alive = early_updates(graph, scopes, memory, late) if waits else ((), late.alive)
        self.bill.memory_profile, self.bill.memory_bytes = tuple(alive.tolist()), int(alive.max())

    def sizes(self) -> list[int]:
        """Bytes that each value takes in memory."""
        stored, narrow = self.assignment.values, bytes(len(self.graph.values))
        if self.topology.compiler.narrows_matrix_operands:
            narrow = bytes(self.copies.narrow[:-1])
        alike = Numbering(value_kinds(self.graph).numbers)
        alike.refine(self._stored_as)
        alike.refine(np.frombuffer(narrow, dtype=np.uint8))
        firsts, numbers = alike.classes()
        sizes = [self._stored_bytes(value, stored[value], bool(narrow[value])) for value in firsts]
        return [sizes[number] for number in numbers.tolist()]

    def _is_narrow(self, value: int) -> bool:
        """Whether a value is kept in the type of matrix operands: what is reduced is another one."""
        return bool(self.topology.compiler.narrows_matrix_operands and self.copies.narrow[value])

    def _stored_bytes(self, value: int, sharding: TensorSharding, narrow: bool = False) -> int:
        known = self.graph.values[value]
        key = (known.shape, known.dtype, narrow, sharding)
        size = self._stored.get(key)
        if size is None:
            size = item_bytes("bfloat16" if narrow else known.dtype) * math.prod(local_shape(known.shape, sharding, self.mesh))
            self._stored[key] = size
        return size

    def _bytes(self, value: int, sharding: TensorSharding) -> int:
        return local_bytes(self.graph.values[value], sharding, self.mesh)


def _sum_in_order(figures: FloatArray) -> float:
    """The sum from first to last, which is that of no other order."""
    return float(np.add.accumulate(figures)[-1]) if len(figures) else 0.0


def _aliases(graph: Graph) -> list[int]:
    """Value id to the value that it is another name of: marks and constraints change nothing but the sharding."""
    same = list(range(len(graph.values)))
    for op in ops_of(graph, IDENTITIES):
        if op.operands[0] != LITERAL:
            same[op.results[0]] = same[op.operands[0]]
    return same
