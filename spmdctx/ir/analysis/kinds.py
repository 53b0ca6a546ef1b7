"""Kinds of ops and of values. A question that depends on the kind alone is asked once per kind, and answered for all at once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from spmdctx.ir.analysis.incidence import ends
from spmdctx.ir.arrays import BoolArray, IntArray
from spmdctx.ir.graph import Graph, Op, Value


class OpKinds(NamedTuple):
    """The number of each op's kind (`Graph.kinds`), and the first op of each kind, which answers for all of them."""

    numbers: IntArray
    firsts: list[Op]

    def flags(self, holds: Callable[[Op], bool]) -> BoolArray:
        """Returns for each op whether `holds`, which depends on the kind alone, is true."""
        return np.fromiter(map(holds, self.firsts), dtype=bool, count=len(self.firsts))[self.numbers]


def op_kinds(graph: Graph) -> OpKinds:
    """Returns the kinds of a graph's ops."""
    known: OpKinds | None = graph.facts.get(op_kinds)
    if known is None:
        numbers = np.array(graph.kinds, dtype=np.int64)
        firsts = np.unique(numbers, return_index=True)[1].tolist()
        known = graph.facts[op_kinds] = OpKinds(numbers, [graph.ops[first] for first in firsts])
    return known


def of_primitives(graph: Graph, primitives: Collection[str]) -> BoolArray:
    """Returns for each op whether it has one of some primitives."""
    return op_kinds(graph).flags(lambda op: op.primitive in primitives)


def ops_of(graph: Graph, primitives: Collection[str]) -> list[Op]:
    """Returns the ops that have one of some primitives, in order."""
    ops = graph.ops
    return [ops[index] for index in np.flatnonzero(of_primitives(graph, primitives)).tolist()]


def inside(graph: Graph) -> BoolArray:
    """Returns for each value whether the op that makes it hands it on inside a fusion; a last False stands for literals."""
    every, (numbers, firsts) = ends(graph), op_kinds(graph)
    bits = [op.fused >> place & 1 for op in firsts for place in range(len(op.operands) + len(op.results))]
    starts = np.cumsum([0, *(len(op.operands) + len(op.results) for op in firsts)])
    made, found = every.is_result, np.zeros(len(graph.values) + 1, dtype=bool)
    ops = every.ops[made]
    found[every.values[made]] = np.array(bits, dtype=bool)[starts[numbers[ops]] + every.places[made]]
    return found


class ValueKinds(NamedTuple):
    """A number for each value, shared by the values of the same shape and type, and the first value of each number."""

    numbers: IntArray
    firsts: list[Value]


def value_kinds(graph: Graph) -> ValueKinds:
    """Returns the kinds of a graph's values; they depend on no sharding."""
    known: ValueKinds | None = graph.facts.get(value_kinds)
    if known is None:
        count = dict[tuple[tuple[int, ...], str], int]()
        numbers = np.array([count.setdefault((shape, dtype), len(count)) for _, shape, dtype, _, _ in graph.values], dtype=np.int64)
        firsts = np.unique(numbers, return_index=True)[1].tolist()
        known = graph.facts[value_kinds] = ValueKinds(numbers, [graph.values[first] for first in firsts])
    return known
