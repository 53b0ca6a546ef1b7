"""Sums that loops only add up: they stay unreduced across devices in every turn, and are reduced once, when they are complete.

    total      what a loop leaves of a carry to which each turn adds: gradients of micro-batches, say
    terms      the values that are partial where they are made, and go nowhere but into the total
    way        all values from a term to the total: sums, casts, transpositions, what inner loops stack or carry

Whatever an assignment says of them, terms can be handed on unreduced where nothing on the way is split over the axes that they are
partial over. Lowering then writes every value on the way with a leading dimension for the devices of those axes, of which each holds
its own element, so that all compilers do the same; those of TPU and GPU would move only the simplest of such reductions by themselves.
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
    """A sum that one loop, or several in each other, add up; `repeats` is how often it is complete in a step.

    `way` holds the terms too, `carries` what turns of loops start from.
    """

    total: int
    repeats: int
    terms: tuple[int, ...]
    way: tuple[int, ...]
    carries: tuple[int, ...]


class Later(NamedTuple):
    """A reduction that is done on the total: so many `times` per execution of the op itself, of `size` times its elements.

    Without `scatters` it is done in no other way.
    """

    times: float
    size: float
    scatters: bool = True


AT_ONCE = Later(1.0, 1.0)


class Summed(NamedTuple):
    """Values on the way of some sums, what the turns of their loops start from, and the totals."""

    way: frozenset[int]
    carries: frozenset[int]
    totals: frozenset[int]

    @classmethod
    def of(cls, sums: Iterable[LoopSum]) -> Summed:
        """Those of some sums."""
        sums = tuple(sums)
        way = frozenset(value for one in sums for value in one.way)
        return cls(way, frozenset(value for one in sums for value in one.carries), frozenset(one.total for one in sums))

    def keeps(self, value: int, *, is_made: bool) -> bool:
        """Whether a value must not be cut further on its way, or its terms could not wait; `is_made` where its op hands it on."""
        return value in self.way or value in (self.totals if is_made else self.carries)


NOTHING_SUMMED = Summed(frozenset(), frozenset(), frozenset())


class Total(NamedTuple):
    """A total that is reduced over some axes, how often in a step, and its terms."""

    axes: AxisNames
    repeats: int
    terms: tuple[int, ...]


class Holds(NamedTuple):
    """What an assignment leaves unreduced: values with the axes that they stay partial over, and the totals."""

    axes: Mapping[int, AxisNames] = MappingProxyType({})
    totals: Mapping[int, Total] = MappingProxyType({})


NO_HOLDS = Holds()


def loop_sums(graph: Graph, stacked: Iterable[int] = ()) -> tuple[LoopSum, ...]:
    """The sums that loops of a graph only add up.

    Args:
        graph: the step.
        stacked: terms that wait for their loop although it only stacks them up: those of a bucket, so that it is reduced as one.
    """
    if not any(op.primitive == SCAN_NEXT or (stacked and op.primitive == SCAN_EXIT) for op in graph.ops):
        return ()
    return tuple(_Finder(graph, frozenset(stacked)).find())


def later_reductions(graph: Graph, sums: Iterable[LoopSum]) -> dict[int, Later]:
    """What reducing later makes of the price of the reductions of values on the way; terms of one total share its reduction."""
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
    """Which of the sums an assignment lets wait, and over which axes."""
    axes: dict[int, AxisNames] = {}
    totals = {}
    for one in sums:
        names = held_axes(graph, one, assignment, mesh)
        if names:
            totals[one.total] = Total(names, one.repeats, one.terms)
            axes.update(dict.fromkeys((*one.way, *one.carries), names))
    return Holds(axes, totals) if totals else NO_HOLDS


def partial_over(graph: Graph, one: LoopSum, assignment: Assignment, mesh: LogicalMesh) -> list[frozenset[str]]:
    """Per partial term of a sum, the axes over which it is."""
    ops = [graph.ops[graph.producers[value]] for value in one.terms]
    every = [frozenset(name for name in partial_axes(op.rule, assignment.ops[op.id].axes) if mesh.sizes[name] > 1) for op in ops]
    return [partial for partial in every if partial]


def held_axes(graph: Graph, one: LoopSum, assignment: Assignment, mesh: LogicalMesh) -> AxisNames:
    """The axes over which any term is partial, else over which all partial ones are; none where the way is split over one of them."""
    producers, terms = graph.producers, frozenset(one.terms)
    partial = partial_over(graph, one, assignment, mesh)
    used: set[str] = set()
    for value in one.terms:
        op = graph.ops[producers[value]]
        used.update(name for names in project(op.rule.results[0], assignment.ops[op.id].axes) for name in names)
    for value in (*one.way, *one.carries, one.total):
        used.update(axes_of(assignment.values[value]))
        if value not in terms:
            used.update(name for own in assignment.ops[producers[value]].axes for name in own)
    held = next((axes for axes in _unions(partial) if used.isdisjoint(axes)), frozenset())
    return tuple(name for name in mesh.names if name in held)


def _unions(partial: Sequence[frozenset[str]]) -> tuple[frozenset[str], ...]:
    """All axes of some sets, and those that are in each of them."""
    return (frozenset.union(*partial), frozenset.intersection(*partial)) if partial else ()


def reduced_dtype(graph: Graph, total: int, terms: Iterable[int], widened: Container[int]) -> str:
    """The type in which a total is reduced: a low precision where all of its terms are of that, and none is `widened`."""
    types = {"float32" if term in widened else graph.values[term].dtype for term in terms}
    return types.pop() if len(types) == 1 and types <= LOW else graph.values[total].dtype


class _Open(NamedTuple):
    """A loop whose carry is followed: what its turn starts from, which must be met once."""

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
        found: list[LoopSum] = []
        claimed: set[int] = set()
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

    def _repeats(self, op: Op) -> int:
        """How often the loop runs of which an op is the end."""
        if op.primitive == SCAN_EXIT:
            return op.repeats
        return self._graph.ops[self._graph.producers[self._before[op.results[0]]]].repeats

    def _carry(self, op: Op) -> bool:
        """Whether a loop only adds to what it hands on, of which `op` is the end."""
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
        """Goes back from a value. A loop's carry is met on ways of additions alone; behind anything else `loop` is None."""
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
        """Goes into another loop that only adds up; what it hands on otherwise is a whole term."""
        kept = len(self._terms), len(self._way), len(self._carries)
        if self._carry(op):
            self._way.append(op.results[0])
        else:
            del self._terms[kept[0] :], self._way[kept[1] :], self._carries[kept[2] :]

    def _is_linear(self, op: Op) -> bool:
        """Whether an op of a sum is the sum of that op of its terms, all elements kept."""
        tensors = [value for value in op.operands if value != LITERAL]
        if len(tensors) != 1 or len(op.results) != 1:
            return False
        before, after = self._graph.values[tensors[0]], self._graph.values[op.results[0]]
        if math.prod(before.shape) != math.prod(after.shape) or not after.dtype.startswith(_FLOATS):
            return False
        if op.primitive in SCALED:
            return len(op.operands) == 2 and (op.primitive == "mul" or op.operands[1] == LITERAL)
        return op.primitive in LINEAR or op.primitive == "reduce_sum"
