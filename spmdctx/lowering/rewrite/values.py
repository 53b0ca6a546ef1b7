"""Records what the rewriter writes where a value is made and where it is read, gathered once from the plan's directives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import Mesh

from spmdctx.cost.price.directives import Directives
from spmdctx.ir.analysis.gradient_order import carriers
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.xla.partitioner.equal_values import equal_values, free_values, turned_products
from spmdctx.machine.xla.partitioner.needed_constraints import NeededConstraints
from spmdctx.trace.build.program import Program


@dataclass(frozen=True)
class ShardedProgram:
    """A program, and everything that is written into it."""

    program: Program
    assignment: Assignment
    mesh: LogicalMesh
    jax_mesh: Mesh
    directives: Directives


class ValueRecord(NamedTuple):
    """The record of one value: what the rewriter writes for it.

    Where it is made:
        is_unconstrained: no constraint, if it is made as it is stored.
        is_constrained: a constraint, even if nothing is moved or reduced there.
        is_equal: the compiler may merge it with an equal value; it is constrained behind a barrier too.
        has_barrier: a barrier behind it.
        is_waited_for: its variable is noted, for a wait.
        is_partial: it stays partial, with a leading dimension for the devices.
        is_widened: its partial result is computed in float32.
        is_grouped: it is a sum that has a bucket or a group.
        is_carrier: the reduction of such a sum may be done on it.

    Where it is read:
        is_moved: all readers take it from one constraint.
        is_recomputed: readers may compute their slices of it.
        is_repeated: it is repeated by an equation of its own.
    """

    is_unconstrained: bool = False
    is_constrained: bool = False
    is_equal: bool = False
    has_barrier: bool = False
    is_waited_for: bool = False
    is_partial: bool = False
    is_widened: bool = False
    is_grouped: bool = False
    is_carrier: bool = False
    is_moved: bool = False
    is_recomputed: bool = False
    is_repeated: bool = False


NO_RECORD = ValueRecord()
"""The record of a value for which nothing is written."""


class Values:
    """The records of all values of a program, and the buckets of its sums."""

    def __init__(self, sharded: ShardedProgram) -> None:
        directives, graph = sharded.directives, sharded.program.graph
        self.grouped = directives.grouped
        self.carriers = carriers(graph, self.grouped) if self.grouped else {}
        self._totals = directives.loop_sums.totals
        self.records = _records(sharded, self.grouped, self.carriers.values())

    def __getitem__(self, value: int) -> ValueRecord:
        """Returns the record of a value."""
        return self.records[value]

    def bucket(self, value: int) -> int | None:
        """Returns the bucket of a gradient's sum, or None if it has none."""
        terms = self._totals[value].terms if value in self._totals else (value,)
        return next((self.grouped[term] for term in terms if term in self.grouped), None)


def _records(sharded: ShardedProgram, grouped: Iterable[int], carried: Iterable[int]) -> tuple[ValueRecord, ...]:
    program, assignment, directives = sharded.program, sharded.assignment, sharded.directives
    graph, moved = program.graph, directives.moved
    equal = equal_values(graph, program.scopes, assignment, moved)
    needed = NeededConstraints(graph, program.from_literals, assignment, sharded.mesh, moved)
    by_field: dict[str, Iterable[int]] = {
        "is_unconstrained": turned_products(graph, assignment) | free_values(graph, program.from_literals, moved),
        "is_constrained": [*equal, *(value for op in graph.ops if op in needed for value in op.results)],
        "is_equal": equal,
        "has_barrier": directives.barriers,
        "is_waited_for": [value for update in directives.waits for value in (update.gate, *update.results)],
        "is_partial": directives.loop_sums.axes,
        "is_widened": directives.widened,
        "is_grouped": grouped,
        "is_carrier": carried,
        "is_moved": moved,
        "is_recomputed": directives.recomputed,
        "is_repeated": directives.repeated,
    }
    flags = [0] * len(graph.values)
    for place, name in enumerate(ValueRecord._fields):
        for value in by_field[name]:
            flags[value] |= 1 << place
    # Few records differ, so equal values share one.
    known = {own: ValueRecord(*(bool(own >> place & 1) for place in range(len(ValueRecord._fields)))) for own in set(flags)}
    return tuple([known[own] for own in flags])
