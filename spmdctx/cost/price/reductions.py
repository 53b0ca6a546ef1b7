"""Prices the reductions of partial results: where they are made, after a loop has added them up, or as a slice of the sum."""

from __future__ import annotations

import math
from dataclasses import replace

from spmdctx.cost.bill import Crossed
from spmdctx.cost.needs import Need
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.collected import Collected, Hiding, Wanted
from spmdctx.cost.price.directives import Directives
from spmdctx.cost.price.memory import MemoryCount
from spmdctx.ir.analysis.loop_sums import reduced_dtype
from spmdctx.ir.collective import Cause
from spmdctx.ir.graph import Op, item_bytes
from spmdctx.ir.mesh import local_shape
from spmdctx.ir.primitives import ADDITIONS
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.xla.collectives.inlining import merged_copies
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.machine.xla.partial_sums import Cut, Readers, Sums
from spmdctx.machine.xla.reductions import ReductionPlan, reduction_plan, scattered_by


class Reductions:
    """The reductions of an assignment.

    `scattered` has the sums that XLA reduce-scatters in the end, each with the slice that is left of it. `crossed` has those that it
    reduces whole because the slices lie in another order than the devices that add them up.
    """

    def __init__(self, assigned: Assigned, directives: Directives, readers: Readers, collected: Collected, memory: MemoryCount) -> None:
        self._assigned, self._directives, self._collected, self._memory = assigned, directives, collected, memory
        self._overlap = overlap_candidates(assigned.graph)
        names = list(range(len(assigned.graph.values)))
        self._copies = merged_copies(assigned.graph, assigned.assignment, names, assigned.topology.compiler).ops
        self._sums = None
        if assigned.topology.compiler.merges_partial_sums:
            self._sums = Sums(readers, assigned.assignment, assigned.mesh, assigned.topology, directives.widened)
        self.scattered: dict[int, TensorSharding] = {}
        self.crossed: list[Crossed] = []

    @property
    def joins_terms(self) -> bool:
        """Returns whether a sum of two reduced values may be reduced in their place."""
        return self._sums is not None

    def reduce(self, op: Op, value: int, natural: TensorSharding, need: Need) -> TensorSharding:
        """Adds what the reduction of a partial result costs; returns the sharding that it leaves the value in."""
        if op.rule.combiner in ("argmax", "argmin"):
            self._memory.keep_unreduced(op, value, natural, in_place=False, scattered=False)
            self._gather_candidates(op, value, natural, need.partial)
            return natural
        later = self._directives.loop_sums.axes.get(value, ())
        stored = self._assigned.assignment.values[value]
        plan = reduction_plan(op, natural, stored, tuple([name for name in need.partial if name not in later]))
        if self._assigned.mesh.num_slices((*plan.scattered, *plan.reduced)) > 1:
            in_place = natural == plan.after and self._memory.is_reduced_in_place(value, natural)
            self._memory.keep_unreduced(op, value, natural, in_place=in_place, scattered=bool(plan.scattered))
        if plan.reduced and not plan.scattered:
            self._memory.reduce_with_others(op, value, natural, plan.reduced)
        self._collect(op, value, natural, need, plan)
        return plan.after

    def _collect(self, op: Op, value: int, natural: TensorSharding, need: Need, plan: ReductionPlan) -> None:
        if op.id in self._copies:
            return
        payload = self._assigned.local_bytes(value, natural) * self._directives.widening(value)
        cause = Cause.sum(op.primitive, self._directives.buckets.get(value))
        if plan.scattered:
            priced = self._scattered_by(value, payload, need.partial, natural, plan.after)
            self._collected.add(op, Wanted("reduce_scatter", plan.scattered, payload, cause, priced), self._hiding(value))
            payload //= self._assigned.mesh.num_slices(plan.scattered)
        if plan.reduced:
            self._collected.add(op, Wanted("all_reduce", plan.reduced, payload, cause), self._hiding(value))
            # Rows outside of the table are masked after the reduction of a gather.
            direct = op.primitive != "gather" or self._assigned.topology.compiler.sinks_slices
            if self._sums and direct and not plan.scattered:
                self._sums.reduced(value, self._collected.last, plan.after)

    def reduce_total(self, op: Op, value: int) -> None:
        """Adds the reduction of a loop's total, if `op` completes it."""
        total = self._directives.loop_sums.totals.get(value)
        if total is None or not total.repeats:
            return
        graph, stored = self._assigned.graph, self._assigned.assignment.values[value]
        axes, repeats, terms = total
        sizes = [item_bytes(dtype) for dtype in (graph.values[value].dtype, reduced_dtype(graph, value, terms, self._directives.widened))]
        payload = self._assigned.local_bytes(value, stored) // sizes[0] * sizes[1]
        maker = graph.ops[graph.producers[terms[0]]]
        buckets = self._directives.buckets
        bucket = next((buckets[term] for term in terms if term in buckets), None)
        cause = Cause.sum(maker.primitive, bucket, in_loop=True)
        self._collected.add(op, Wanted("all_reduce", axes, payload, cause), self._hiding(value), repeats)
        if self._sums:
            self._sums.reduced(value, self._collected.last, stored)

    def join_terms(self, op: Op, need: Need) -> None:
        """Reduces the sum of two reduced values once, after the addition."""
        if self._sums is None or op.primitive not in ADDITIONS or need.operands or need.partial:
            return
        places = self._sums.terms(op)
        if places is not None:
            first, second = (self._collected.rows[place] for place in places)
            # One reduction over the same devices, in whatever order their axes are.
            if {*first.axes} == {*second.axes} and first.repeats == second.repeats == op.repeats:
                self._sums.join(op, *places)

    def settle(self) -> None:
        """Removes joined all_reduces from the bill, and turns all_reduces whose results are only sliced into reduce_scatters."""
        if self._sums is None:
            return
        rows, mesh = self._collected.rows, self._assigned.mesh
        for cut in self._sums.slices():
            row = rows[cut.place]
            if cut.axes and set(cut.axes) == {name for name in row.axes if mesh.sizes[name] > 1}:
                kind = self._scattered_by(cut.value, row.payload_bytes, row.axes, cut.whole, cut.kept)
                if kind == "all_reduce" and cut.place in self._sums.added:
                    self._note_order(cut, row.axes, row.payload_bytes)
                time_s = collective_time_s(kind, row.payload_bytes, cut.axes, mesh, self._collected.machines[cut.place])
                rows[cut.place] = replace(row, kind="reduce_scatter", axes=cut.axes, time_s=time_s)
                self.scattered[cut.value] = cut.kept
        self._collected.drop(self._sums.joined)

    def _note_order(self, cut: Cut, order: AxisNames, payload: int) -> None:
        """Notes a sum whose slices could be scattered if they lay in the order of the devices that add them up."""
        wanted = tuple([_in_order_of(order, names) if names != whole else names for names, whole in zip(cut.kept, cut.whole, strict=True)])
        if wanted != cut.kept and self._scattered_by(cut.value, payload, order, cut.whole, wanted) == "reduce_scatter":
            self.crossed.append(Crossed(cut.value, cut.kept, wanted))

    def _gather_candidates(self, op: Op, value: int, natural: TensorSharding, partial: AxisNames) -> None:
        """Adds the gathers by which XLA compares every device's best value, and its index."""
        values, slices = self._assigned.graph.values, self._assigned.mesh.num_slices(partial)
        hiding = Hiding(self._overlap.reduction_share(value, self._assigned.topology))
        for dtype in (values[op.operands[0]].dtype, values[value].dtype):
            payload = self._assigned.local_bytes(value, natural) // item_bytes(values[value].dtype) * item_bytes(dtype) * slices
            self._collected.add(op, Wanted("all_gather", partial, payload, Cause.sum(op.primitive)), hiding)

    def _scattered_by(self, value: int, payload: int, partial: AxisNames, whole: TensorSharding, kept: TensorSharding) -> str:
        """Returns the kind of collective that the compiler makes of a reduce_scatter of `payload` bytes."""
        shape, mesh = self._assigned.graph.values[value].shape, self._assigned.mesh
        size = payload // max(1, math.prod(local_shape(shape, whole, mesh)))
        return scattered_by(shape, size, partial, whole, kept, mesh, self._assigned.topology)

    def _hiding(self, value: int) -> Hiding:
        topology = self._assigned.topology
        return Hiding(self._overlap.reduction_share(value, topology), self._overlap.reduction_machine(value, topology))


def _in_order_of(order: AxisNames, names: AxisNames) -> AxisNames:
    """Returns the axes in the order in which a sum is spread over them; those that it is not spread over stay in front."""
    return (*(name for name in names if name not in order), *(name for name in order if name in names))
