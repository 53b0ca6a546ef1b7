"""Prices the moves of values between shardings.

A move is made once per computation (top level, loop body, remat body), however many ops read the result: the compiler merges equal ones,
also of calls that it inlines (`machine.xla.collectives.inlining`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmdctx.cost.bill import Moved
from spmdctx.cost.memory.loops import Loops
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.collected import Collected, Hiding, Wanted
from spmdctx.cost.price.directives import Directives
from spmdctx.cost.price.memory import MemoryCount
from spmdctx.cost.roofline import passing_values, written_s
from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.collective import Cause
from spmdctx.ir.graph import LITERAL, Graph, Op, item_bytes
from spmdctx.ir.mesh import format_sharding
from spmdctx.ir.primitives import ENTERING, IDENTITIES
from spmdctx.ir.sharding import TensorSharding
from spmdctx.machine.reshard import ReshardStep, reshard_steps
from spmdctx.machine.xla.collectives.inlining import merged_copies, merged_scopes
from spmdctx.machine.xla.collectives.turning import turned_bytes, turned_s
from spmdctx.machine.xla.narrowing import sharers
from spmdctx.machine.xla.overlap import overlap_candidates


class Move(NamedTuple):
    """A value on its way to an op, as the operand at `position`, or from the op that makes it if there is no position.

    `narrow` says that it travels in the type of matrix operands; `repeats` is 0 if it moves as often as the op runs.
    """

    op: Op
    value: int
    source: TensorSharding
    target: TensorSharding
    narrow: bool
    repeats: int
    position: int | None = None

    @property
    def is_result(self) -> bool:
        """Returns whether the op makes the value."""
        return self.position is None


class _Written(NamedTuple):
    """A value that exists only inside fusions and is written, `repeats` times a step, because an op has it moved."""

    op: int
    value: int
    source: TensorSharding
    target: TensorSharding
    repeats: int


class Moves:
    """The moves of an assignment; `rows` has them all."""

    def __init__(self, assigned: Assigned, directives: Directives, collected: Collected, memory: MemoryCount) -> None:
        graph = assigned.graph
        self._assigned, self._directives, self._collected = assigned, directives, collected
        self._scopes, self._copies, self._overlap = assigned.step.scopes, memory.copies, overlap_candidates(graph)
        self._sharers, self._passing = sharers(graph), passing_values(graph)
        compiler, scopes = assigned.topology.compiler, assigned.step.scopes
        self._merged = merged_scopes(graph.inlined, scopes) if compiler.merges_inlined else scopes
        self._same = merged_copies(graph, assigned.assignment, _aliases(graph), compiler).same
        self._done: set[tuple[object, ...]] = set()
        # Values that exist only inside fusions are written before they move.
        self._written: list[_Written] = []
        self._outputs, self._turned = frozenset(graph.outputs) - {LITERAL}, dict[tuple[int, int], float]()
        self.rows: list[Moved] = []

    def add(self, move: Move) -> None:
        """Adds what a move costs, and the copies that it makes."""
        op, value, source, target = move.op, move.value, move.source, move.target
        scope, known = self._merged[op.id], self._assigned.graph.values[value]
        time_s, current = 0.0, source
        hiding = Hiding(self._overlap.gather_share(value, self._assigned.topology))
        direct = self._steps(move, source, target)
        steps = direct
        via = self._directives.routes.get((self._scopes[op.id], value)) if self._sharers[op.id] and not move.is_result else None
        if via is not None:
            steps = (*self._steps(move, source, via), *self._steps(move, via, target))
        if self._passing[value] and (scope, self._same[value], source, steps[0].sharding) not in self._done:
            self._written.append(_Written(op.id, value, source, target, move.repeats or op.repeats))
        for step in steps:
            key = (scope, self._same[value], current, step.sharding)
            if step.kind != "slice" and key not in self._done:
                cause = Cause.move(move.position, op.primitive, known.path, format_sharding(current), format_sharding(step.sharding))
                time_s += self._collected.add(op, Wanted(step.kind, step.axes, step.payload_bytes, cause), hiding, move.repeats)
            self._done.add(key)
            current = step.sharding
        self._copy(move, scope, direct)
        made = value if move.is_result else op.results[0] if op.primitive in IDENTITIES else LITERAL
        if made in self._outputs:
            self._turn(move)
        self.rows.append(Moved(value, source, target, op.id, time_s))

    def written(self, scattered: Mapping[int, TensorSharding]) -> tuple[list[int], list[float]]:
        """Returns the ops that have values written in order to move them, and the seconds that each writing takes.

        The collective writes a `scattered` sum as its slice. A slice that moves on from there is written once more.
        """
        seconds = [self._writing_s(one, scattered) for one in self._written]
        return [*(one.op for one in self._written), *(op for op, _ in self._turned)], [*seconds, *self._turned.values()]

    def _turn(self, move: Move) -> None:
        """Adds the copy by which the compiler turns what the step returns; where the user's mark decides the move, only its memory."""
        assigned, known = self._assigned, self._assigned.graph.values[move.value]
        made = (known.shape, item_bytes(known.dtype), move.source, move.target, assigned.mesh)
        seconds = turned_s(*made, assigned.topology)
        if not seconds:
            return
        self._copies.turn(move.op, move.value, turned_bytes(*made))
        if move.is_result:
            self._turned[move.op.id, move.value] = seconds * (move.repeats or move.op.repeats)

    def _writing_s(self, one: _Written, scattered: Mapping[int, TensorSharding]) -> float:
        source, assigned = scattered.get(one.value, one.source), self._assigned
        if source == one.target:
            return 0.0
        return written_s(assigned.graph.values[one.value], source, assigned.mesh, assigned.topology) * one.repeats

    def _steps(self, move: Move, source: TensorSharding, target: TensorSharding) -> Sequence[ReshardStep]:
        known = self._assigned.graph.values[move.value]
        size = item_bytes("bfloat16" if move.narrow else known.dtype)
        return reshard_steps(known.shape, size, source, target, self._assigned.mesh, self._directives.all_to_all)

    def _copy(self, move: Move, scope: int, steps: Sequence[ReshardStep]) -> None:
        """Adds the copies that a value leaves in memory on its way, as if no other op shared them."""
        op, value, current, copies = move.op, move.value, move.source, self._copies
        overlaps = self._assigned.topology.compiler.gather_overlap > 0
        gathered, last = None, max((place for place, step in enumerate(steps) if step.kind != "slice"), default=0)
        for place, step in enumerate(steps):
            key = (scope, self._same[value], current, step.sharding)
            if step.kind == "slice":
                if op.primitive in ENTERING and not move.is_result:
                    self._slice_for_loop(move, key, step.sharding)
                elif gathered is not None and (move.is_result or op.primitive in IDENTITIES):
                    copies.slice_of(gathered, value if move.is_result else op.results[0])
            elif not (step.sharding == self._assigned.assignment.values[value] and copies.is_materialized(value)):
                size = self._assigned.stored_bytes(value, step.sharding, move.narrow)
                if move.is_result and copies.is_materialized(value):
                    copies.make_after(op, key, size)
                elif place < last:
                    copies.pass_through(op, key, size)
                else:
                    copies.make(op, value, key, size, gathered=step.kind == "all_gather" and overlaps)
                gathered = key if step.kind == "all_gather" else None
            current = step.sharding

    def _slice_for_loop(self, move: Move, key: object, sharding: TensorSharding) -> None:
        """Adds the part of a stack that a device's iterations read, where it has the whole stack: XLA cuts it off before the loop."""
        assigned = self._assigned
        if assigned.graph.values[move.value].shape != assigned.graph.values[move.op.results[0]].shape:
            last = Loops(assigned.graph, self._scopes).last[move.op.id]
            self._copies.keep_for_loop(move.op, key, last, assigned.stored_bytes(move.value, sharding, move.narrow))


def _aliases(graph: Graph) -> list[int]:
    """Returns, for each value, the value that it is another name of.

    Marks and constraints change nothing but the sharding. What enters a loop whole, and is not cut into its iterations, moves before it.
    """
    same, values = list(range(len(graph.values))), graph.values
    for op in ops_of(graph, IDENTITIES | ENTERING):
        value = op.operands[0]
        if value != LITERAL and values[value].shape == values[op.results[0]].shape:
            same[op.results[0]] = same[value]
    return same
