"""Sums that loops only add up: they stay unreduced across devices in every iteration, and are reduced once, when they are complete.

    total      the result of a loop for a carry to which each iteration adds: gradients of micro-batches, say
    terms      the values that are partial where they are made, and go nowhere but into the total
    way        all values from a term to the total: sums, casts, transpositions, values that inner loops stack or carry

In any assignment, terms can be handed on unreduced if nothing on the way is split over the axes over which they are partial. Lowering then
gives every value on the way a leading dimension for the devices of those axes; each device holds its own element. So all compilers do the
same: those of TPU and GPU would move only the simplest of these reductions by themselves.

Several runs of a program complete an accumulator. Its total is the program's result, which keeps its leading dimension: no run reduces it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from spmdctx.ir.graph import LITERAL, LOW, Graph, Op
from spmdctx.ir.mesh import LogicalMesh, axes_of
from spmdctx.ir.primitives import ADDITIONS, IDENTITIES, LINEAR, SCALED, SCAN_ENTER, SCAN_EXIT, SCAN_NEXT, TERMS
from spmdctx.ir.projection import partial_axes, project
from spmdctx.ir.rule import FactorKind
from spmdctx.ir.sharding import Assignment, AxisNames

_FLOATS = ("float", "bfloat")


class LoopSum(NamedTuple):
    """A sum that one loop adds up, or several nested ones; `repeats` says how often it is completed in a step.

    `way` also holds the terms. `carries` holds the values from which iterations of loops start. Of an accumulator, `repeats` is one over
    the runs that complete it, and the carry is the program's argument.
    """

    total: int
    repeats: float
    terms: tuple[int, ...]
    way: tuple[int, ...]
    carries: tuple[int, ...]


class Later(NamedTuple):
    """A reduction that is done on the total instead of on the result of an op.

    It runs `times` times per execution of the op, on `size` times the elements of its result. If `scatters` is False, the op has no
    choice: its result may not be scattered instead.
    """

    times: float
    size: float
    scatters: bool = True


AT_ONCE = Later(1.0, 1.0)


class Summed(NamedTuple):
    """The values on the way of some sums, those from which iterations of their loops start, and the totals."""

    way: frozenset[int]
    carries: frozenset[int]
    totals: frozenset[int]

    @classmethod
    def of(cls, sums: Iterable[LoopSum]) -> Summed:
        """Collects the values of some sums."""
        sums = tuple(sums)
        way = frozenset(value for one in sums for value in one.way)
        return cls(way, frozenset(value for one in sums for value in one.carries), frozenset(one.total for one in sums))

    def keeps(self, value: int, *, is_made: bool) -> bool:
        """Returns whether a value must not be split further where it is handed on, because its terms could not wait then.

        `is_made` says that the op which makes the value hands it on.
        """
        return value in self.way or value in (self.totals if is_made else self.carries)


NOTHING_SUMMED = Summed(frozenset(), frozenset(), frozenset())


class Total(NamedTuple):
    """The axes over which a total is reduced, how often that happens in a run of the program, and the terms of the total."""

    axes: AxisNames
    repeats: int
    terms: tuple[int, ...]


class Holds(NamedTuple):
    """The sums that an assignment leaves unreduced: values with the axes over which they stay partial, and the totals."""

    axes: Mapping[int, AxisNames] = MappingProxyType({})
    totals: Mapping[int, Total] = MappingProxyType({})


NO_HOLDS = Holds()


def loop_sums(graph: Graph, stacked: Iterable[int] = ()) -> tuple[LoopSum, ...]:
    """Returns the sums that loops of a graph only add up.

    Args:
        graph: The step.
        stacked: Terms of buckets. They wait for their loop even if it only stacks them, so that a bucket is reduced as a whole.
    """
    if not graph.accumulators and not any(op.primitive == SCAN_NEXT or (stacked and op.primitive == SCAN_EXIT) for op in graph.ops):
        return ()
    return tuple(_Finder(graph, frozenset(stacked)).find())


def later_reductions(graph: Graph, sums: Iterable[LoopSum]) -> dict[int, Later]:
    """Returns for each value on the way how its reduction changes if it is done later; terms of one total share its reduction."""
    found = {}
    for one in sums:
        terms = frozenset(one.terms)
        whole = math.prod(graph.values[one.total].shape)
        for value in one.way:
            executions = graph.ops[graph.producers[value]].repeats
            times = one.repeats / max(1, executions) / (len(terms) if value in terms else 1)
            found[value] = Later(times, whole / max(1, math.prod(graph.values[value].shape)))
    return found


def holds_of(graph: Graph, sums: Iterable[LoopSum], assignment: Assignment, mesh: LogicalMesh) -> Holds:
    """Returns the sums that an assignment lets wait, with the axes over which they do."""
    axes: dict[int, AxisNames] = {}
    totals = {}
    for one in sums:
        names = held_axes(graph, one, assignment, mesh)
        if names:
            totals[one.total] = Total(names, int(one.repeats), one.terms)
            axes.update(dict.fromkeys((*one.way, *one.carries), names))
    return Holds(axes, totals) if totals else NO_HOLDS


def partial_over(graph: Graph, one: LoopSum, assignment: Assignment, mesh: LogicalMesh) -> list[frozenset[str]]:
    """Returns for each partial term of a sum the axes over which it is partial."""
    ops = [graph.ops[graph.producers[value]] for value in one.terms]
    every = [frozenset(name for name in partial_axes(op.rule, assignment.ops[op.id].axes) if mesh.sizes[name] > 1) for op in ops]
    return [partial for partial in every if partial]


def held_axes(graph: Graph, one: LoopSum, assignment: Assignment, mesh: LogicalMesh) -> AxisNames:
    """Returns the axes over which any term is partial, if the way is split over none of them.

    Otherwise returns those over which all partial terms are, on the same condition, else none.
    """
    producers, terms = graph.producers, frozenset(one.terms)
    partial = partial_over(graph, one, assignment, mesh)
    used: set[str] = set()
    for value in one.terms:
        op = graph.ops[producers[value]]
        used.update(name for names in project(op.rule.results[0], assignment.ops[op.id].axes) for name in names)
    for value in (*one.way, *one.carries, one.total):
        used.update(axes_of(assignment.values[value]))
        if value not in terms and value in producers:
            used.update(name for own in assignment.ops[producers[value]].axes for name in own)
    held = next((axes for axes in _unions(partial) if used.isdisjoint(axes)), frozenset())
    return tuple(name for name in mesh.names if name in held)


def _unions(partial: Sequence[frozenset[str]]) -> tuple[frozenset[str], ...]:
    """Returns the union and the intersection of some sets of axes; nothing if there are no sets."""
    return (frozenset.union(*partial), frozenset.intersection(*partial)) if partial else ()


def reduced_dtype(graph: Graph, total: int, terms: Iterable[int], widened: Container[int]) -> str:
    """Returns the type in which a total is reduced: a low-precision type if all terms have it and none is `widened`."""
    types = {"float32" if term in widened else graph.values[term].dtype for term in terms}
    return types.pop() if len(types) == 1 and types <= LOW else graph.values[total].dtype


def widened_ways(graph: Graph, holds: Holds, widened: Container[int]) -> frozenset[int]:
    """Returns the low-precision values of unreduced sums that are in float32, as the `widened` terms are from which they are made.

    A cast, and the end of a loop's iteration, give such a value its own type again.
    """
    found = {term for total in holds.totals.values() for term in total.terms if term in widened and graph.values[term].dtype in LOW}
    for op in graph.ops if found else ():
        if op.primitive not in _TYPED and not found.isdisjoint(op.operands):
            found.update(value for value in op.results if value in holds.axes and graph.values[value].dtype in LOW)
    return frozenset(found)


_TYPED = frozenset({"convert_element_type", SCAN_NEXT})


class _Open(NamedTuple):
    """A loop whose carry is followed: the value from which its iteration starts, and how often it was met, which must be once."""

    carry: int
    met: list[int]


class _Finder:
    def __init__(self, graph: Graph, stacked: frozenset[int]) -> None:
        self._graph, self._stacked = graph, stacked
        self._reads = [0] * (len(graph.values) + 1)
        for op in graph.ops:
            for value in op.operands:
                self._reads[value] += 1
        for value in graph.outputs:
            self._reads[value] += 1
        self._before = {after: before for before, after in graph.ties}
        self._terms: list[int] = []
        self._way: list[int] = []
        self._carries: list[int] = []

    def find(self) -> list[LoopSum]:
        found = self._accumulated()
        claimed = {value for one in found for value in one.way}
        for op in reversed(self._graph.ops):
            if op.primitive not in (SCAN_NEXT, SCAN_EXIT) or op.results[0] in claimed:
                continue
            self._terms, self._way, self._carries = [], [], []
            if op.primitive == SCAN_EXIT and self._stacked:
                self._follow(op.operands[0], None)
            fits = self._carry(op) if op.primitive == SCAN_NEXT else not self._stacked.isdisjoint(self._terms)
            if not fits or not self._terms:
                continue
            way, carries = tuple(sorted(self._way)), tuple(self._carries)
            claimed.update(way)
            found.append(LoopSum(op.results[0], self._repeats(op), tuple(sorted(self._terms)), way, carries))
        return found[::-1]

    def _accumulated(self) -> list[LoopSum]:
        """Returns the sums of accumulators of which no term waits for a bucket, last ones first."""
        found = []
        for before, after, runs in reversed(self._graph.accumulators):
            self._terms, self._way, self._carries = [], [], [before]
            loop = _Open(before, [])
            if self._reads[before] == 1:
                self._follow(after, loop)
            if len(loop.met) == 1 and self._terms and self._stacked.isdisjoint(self._terms):
                found.append(LoopSum(after, 1 / runs, tuple(sorted(self._terms)), tuple(sorted(self._way)), (before,)))
        return found

    def _repeats(self, op: Op) -> int:
        """Returns how often the loop runs that ends at an op."""
        if op.primitive == SCAN_EXIT:
            return op.repeats
        return self._graph.ops[self._graph.producers[self._before[op.results[0]]]].repeats

    def _carry(self, op: Op) -> bool:
        """Returns whether the loop that ends at `op` only adds to the carry that it hands on."""
        graph, carry = self._graph, self._before.get(op.results[0], LITERAL)
        producer = graph.producers.get(carry)
        if producer is None or graph.ops[producer].primitive != SCAN_ENTER or self._reads[carry] != 1:
            return False
        if not graph.values[carry].dtype.startswith(_FLOATS):
            return False
        loop = _Open(carry, [])
        self._carries.append(carry)
        self._follow(op.operands[0], loop)
        return len(loop.met) == 1

    def _follow(self, start: int, start_loop: _Open | None) -> None:
        """Goes back from a value. Only additions lead to the carry of the loop; behind any other op `loop` is None."""
        graph, waiting = self._graph, [(start, start_loop)]
        while waiting:
            value, loop = waiting.pop()
            if loop is not None and value == loop.carry:
                loop.met.append(value)
                continue
            producer = graph.producers.get(value)
            if producer is None or self._reads[value] != 1:
                continue
            op = graph.ops[producer]
            if op.primitive == SCAN_NEXT:
                self._follow_carry(op)
                continue
            behind = loop if op.primitive in ADDITIONS or op.primitive in IDENTITIES else None
            if op.primitive in (*ADDITIONS, *IDENTITIES, SCAN_EXIT) or self._is_linear(op):
                self._way.append(value)
                waiting += [(operand, behind) for operand in op.operands if operand != LITERAL]
            elif op.primitive in TERMS and op.rule.combiner == "add" and FactorKind.REDUCTION in op.rule.kinds:
                self._way.append(value)
                self._terms.append(value)

    def _follow_carry(self, op: Op) -> None:
        """Goes into an inner loop that only adds up; the result of any other loop is a whole term."""
        kept = len(self._terms), len(self._way), len(self._carries)
        if self._carry(op):
            self._way.append(op.results[0])
        else:
            del self._terms[kept[0] :], self._way[kept[1] :], self._carries[kept[2] :]

    def _is_linear(self, op: Op) -> bool:
        """Returns whether an op commutes with a sum of its operand and keeps all elements."""
        tensors = [value for value in op.operands if value != LITERAL]
        if len(tensors) != 1 or len(op.results) != 1:
            return False
        before, after = self._graph.values[tensors[0]], self._graph.values[op.results[0]]
        if math.prod(before.shape) != math.prod(after.shape) or not after.dtype.startswith(_FLOATS):
            return False
        if op.primitive in SCALED:
            return len(op.operands) == 2 and (op.primitive == "mul" or op.operands[1] == LITERAL)
        return op.primitive in LINEAR or op.primitive == "reduce_sum"
