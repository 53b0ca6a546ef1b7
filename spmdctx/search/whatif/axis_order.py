"""Puts the axes of a split in the order in which devices add up the sum that is split, so that the sum is scattered.

A search does not follow in which order of axes sums of unreduced terms are spread over the devices, so any order costs it the same. The
compiler scatters only into one of them (`machine.xla.reductions`), and reduces the whole sum otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from spmdctx.cost.bill import Crossed
from spmdctx.cost.step import Step, bill_of
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.sharding import Assignment, AxisNames, OpSharding
from spmdctx.machine.topology import Topology
from spmdctx.search.setup.request import Setup


class _Place(NamedTuple):
    """A dimension of a value."""

    value: int
    dim: int


def with_axes_in_order(step: Step, setup: Setup, assignment: Assignment, topology: Topology) -> Assignment:
    """Returns the assignment with other orders of axes where these make it cheaper, and nothing that is fixed changes."""
    if not topology.compiler.scatters_strictly:
        return assignment
    best = bill_of(step, assignment, setup.mesh, topology)
    for one in best.crossed:
        other = _reordered(step.graph, setup, assignment, one)
        if other is None:
            continue
        bill = bill_of(step, other, setup.mesh, topology)
        if bill.total_s < best.total_s and bill.safe_bytes <= best.safe_bytes:
            assignment, best = other, bill
    return assignment


def _reordered(graph: Graph, setup: Setup, assignment: Assignment, one: Crossed) -> Assignment | None:
    """Returns the assignment in which all that a sum's slices become is split in the wanted order; None where it is fixed otherwise."""
    dim = next(dim for dim, (old, new) in enumerate(zip(one.kept, one.wanted, strict=True)) if old != new)
    turn = _Turn(graph, assignment, one.kept[dim], one.wanted[dim])
    results = [value for op in graph.readers[one.value] for value in op.results]
    turn.spread([_Place(value, dim) for value in (one.value, *results) if assignment.values[value] == one.kept])
    fixed = setup.pins.keys() | setup.partial_pins.keys()
    if setup.couplings or any(place.value in fixed for place in turn.places) or any(op in setup.forced for op in turn.factors):
        return None
    return turn.assignment()


class _Turn:
    """A change of the order of axes, from the dimensions where it begins to all that share it."""

    def __init__(self, graph: Graph, assignment: Assignment, old: AxisNames, new: AxisNames) -> None:
        self._graph, self._assignment, self._old, self._new = graph, assignment, old, new
        self._tied: dict[int, list[int]] = {}
        for before, after in graph.ties:
            self._tied.setdefault(before, []).append(after)
            self._tied.setdefault(after, []).append(before)
        self.places: dict[_Place, None] = {}
        self.factors: dict[int, set[int]] = {}

    def spread(self, starts: list[_Place]) -> None:
        """Follows values that have the old order to ops whose factors have it, and to all that these read and make so."""
        left = starts
        while left:
            place = left.pop()
            if place.value == LITERAL or place in self.places or self._assignment.values[place.value][place.dim] != self._old:
                continue
            self.places[place] = None
            left += [_Place(other, place.dim) for other in self._tied.get(place.value, ())]
            makers = [self._graph.producers[place.value]] if place.value in self._graph.producers else []
            for op in (*(self._graph.ops[maker] for maker in makers), *self._graph.readers[place.value]):
                left += self._through(op, place)

    def _through(self, op: Op, place: _Place) -> list[_Place]:
        """Returns the dimensions of an op's tensors that have a factor in common with one of a value's, which has the old order."""
        sides = [*zip(op.operands, op.rule.operands, strict=True), *zip(op.results, op.rule.results, strict=True)]
        axes, known = self._assignment.ops[op.id].axes, self.factors.setdefault(op.id, set())
        at = {dims[place.dim] for value, dims in sides if value == place.value}
        found = {own[0] for own in at if len(own) == 1 and axes[own[0]] == self._old} - known
        known |= found
        return [_Place(value, dim) for value, dims in sides for dim, own in enumerate(dims) if len(own) == 1 and own[0] in found]

    def assignment(self) -> Assignment:
        """Returns the changed assignment."""
        values, ops = list(self._assignment.values), list(self._assignment.ops)
        for value, dim in self.places:
            values[value] = tuple([self._new if own == dim else names for own, names in enumerate(values[value])])
        for op, factors in self.factors.items():
            ops[op] = OpSharding(tuple([self._new if factor in factors else own for factor, own in enumerate(ops[op].axes)]))
        return replace(self._assignment, values=tuple(values), ops=tuple(ops))
