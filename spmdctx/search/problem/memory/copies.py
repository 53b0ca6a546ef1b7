"""Rows of memory for copies, which need auxiliary nodes: those that uses gather, and those that ops make for themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.cost.memory.lives import StepMemory
from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.ir.domain import domain
from spmdctx.ir.graph import item_bytes
from spmdctx.ir.primitives import MATRIX_PRODUCTS
from spmdctx.ir.rule import FactorKind
from spmdctx.machine.xla.narrowing import NARROW_BYTES
from spmdctx.search.problem.memory.stored import StoredRows
from spmdctx.search.problem.network import Carry, Source
from spmdctx.search.problem.tables import Tables
from spmdctx.search.solver.problem.problem import Edge, Problem

Passing = Carry | Source
"""A source of copies for one op alone: an edge into an op, an edge from an op to a slot, or a result that may be partial."""

_Way = list[tuple[int, BoolArray]]
_Readers = frozenset[tuple[int, int]]
"""The nodes that read a value, each with the position at which it takes it."""


class _Reader(NamedTuple):
    time: int
    node: int
    position: int


class CopyRows(StoredRows):
    """Rows that also count copies; each makes an auxiliary node."""

    def __init__(self, tables: Tables, problem: Problem, spread: float) -> None:
        super().__init__(tables, problem, spread)
        self._auxiliary: dict[tuple[object, ...], int] = {}
        self._into_use = {carry.target: carry for carry in self._network.carries if self._network.nodes[carry.target].sort == "use"}
        self._slices: dict[tuple[object, ...], BoolArray] = {}
        # Tables are shared by the `id` of their arrays, so the arrays must stay alive.
        self._kept: list[object] = []

    def _add(self, key: tuple[object, ...], node: int, table: FloatArray) -> int:
        auxiliary = self._auxiliary[key] = len(self._costs)
        self._costs.append(np.zeros(table.shape[1]))
        self._usages.append(None)
        self._edges.append(Edge(node, auxiliary, table))
        return auxiliary

    def add_copies(self, memory: StepMemory) -> None:
        """Adds the copies that uses gather, from the first to the last product that takes them; those that may run last are left out."""
        network = self._network
        readers: dict[tuple[int, int], list[_Reader]] = {}
        moves = _may_be_elsewhere(memory)
        for op, scope in zip(self._space.graph.ops, network.scopes, strict=True):
            if op.primitive in MATRIX_PRODUCTS and op.id not in moves:
                for position, value in enumerate(op.operands):
                    if (value, scope) in network.uses:
                        own = _Reader(memory.times[op.id], network.folded.op_class[op.id], position)
                        readers.setdefault((value, scope), []).append(own)
        for key, node in network.uses.items():
            if key not in readers:
                continue
            times = [reader.time for reader in readers[key]]
            first, last = (frozenset(own[1:] for own in readers[key] if own.time == time) for time in (min(times), max(times)))
            self._live(self._gathered_node(node, key[0], (first, last)), min(times), max(times) + 1)

    def _gathered_node(self, node: int, value: int, ends: tuple[_Readers, _Readers]) -> int:
        """Adds the node of a use's gathered copy.

        It occupies nothing where it is a slice of the stored value, or where the first or the last readers take another sharding.
        """
        key = ("gathered", node, *ends)
        known = self._auxiliary.get(key)
        if known is not None:
            return known
        carry = self._into_use[node]
        size = self._copied_bytes(value, carry)
        ways: list[_Way] = [[(carry.source.node, self._is_slice(carry.source, value))]]
        for readers in dict.fromkeys(ends):
            others = [(reader, self._tables.choices[reader].taken[position]) for reader, position in sorted(readers)]
            ways.append([(reader, taken[:, None] != np.arange(len(size))) for reader, taken in others])
        return self._excused(key, node, self._tables.choices[node].taken[0], size, ways)

    def add_own_copies(self, memory: StepMemory, passing: Collection[Passing]) -> None:
        """Adds the copies that ops make for themselves while they run: operands as ops take them, results before they are stored."""
        folded, nodes, ops = self._network.folded, self._network.nodes, self._space.graph.ops
        seen: dict[tuple[int, int], int] = {}
        moves = _may_be_elsewhere(memory)
        for carry in passing:
            if isinstance(carry, Source):
                partial = self._partial_node(carry, memory)
                for op in folded.op_members[carry.node]:
                    self._live(partial, memory.runs[op], memory.times[op] + 1)
                continue
            value = self._network.carries[carry].value
            into_op = nodes[carry.target].sort == "op"
            members = folded.op_members[carry.target if into_op else carry.source.node]
            if into_op or not memory.materialized[value]:
                copy = self._copy_node(carry, value, into_op)
                for op in members:
                    if op in moves and into_op:
                        continue
                    # Ops that run together may read one copy.
                    taken = ops[op].operands[carry.position] if into_op else ops[op].results[carry.source.result]
                    if seen.setdefault((taken, memory.times[op]), op) == op:
                        self._live(copy, memory.times[op], memory.times[op] + 1)
            if not into_op:
                made = self._made_node(carry, value)
                for op in members:
                    self._live(made, memory.runs[op], memory.runs[op] + 1)

    def _copy_node(self, carry: Carry, value: int, into_op: bool) -> int:
        """Adds the node of the copy that the target of an edge makes.

        It occupies nothing where it is a slice of the stored value, or where another copy has the same sharding.
        """
        node, position, key = carry.target, carry.position, ("copy", carry)
        known = self._auxiliary.get(key)
        if known is not None:
            return known
        taken = self._tables.choices[node].taken[position]
        ways: list[_Way] = [[(carry.source.node, self._is_slice(carry.source, value))]]
        if into_op:
            numbers = np.arange(len(domain(self._space.mesh, self._space.graph.values[value].shape)))
            gathered = self._into_use.get(carry.source.node)
            if gathered is not None:
                # Copies are made from the stored value, whatever other uses gather.
                ways.append([(gathered.source.node, self._is_slice(gathered.source, value))])
            for use in self._uses_beside(carry):
                ways.append([(use, self._tables.choices[use].taken[0][:, None] == numbers)])
            for other in self._earlier(carry):
                own = self._tables.choices[node].taken[other]
                ways.append([(node, (own == taken)[:, None] & (taken[:, None] == numbers))])
        return self._excused(key, node, taken, self._copied_bytes(value, carry), ways)

    def _uses_beside(self, carry: Carry) -> list[int]:
        """Returns the use nodes of the value on an edge, except the one that the edge comes from."""
        network, ops = self._network, self._space.graph.ops
        if not network.uses:
            return []
        keys = [(ops[op].operands[carry.position], network.scopes[op]) for op in network.folded.op_members[carry.target]]
        return sorted({network.uses[key] for key in keys if key in network.uses} - {carry.source.node})

    def _earlier(self, carry: Carry) -> list[int]:
        """Lists the earlier positions at which the target of an edge takes the same value."""
        operands = self._space.graph.ops[self._network.nodes[carry.target].member].operands
        return [position for position in range(carry.position) if operands[position] == operands[carry.position]]

    def _is_slice(self, source: Source, value: int) -> BoolArray:
        """Returns whether no bytes move from the stored sharding to another one, for each [state, sharding]."""
        stored, shape = self._tables.choices[source.node].stored[source.result], self._space.graph.values[value].shape
        key = ("slice", id(stored), shape)
        known = self._slices.get(key)
        if known is None:
            known = self._slices[key] = self._tables.reshard_s(shape, 1)[stored] == 0.0
        return known

    def _copied_bytes(self, value: int, carry: Carry) -> FloatArray:
        """Returns the bytes of a copy of a value for each sharding."""
        known = self._space.graph.values[value]
        return self._bytes(value, None) * (NARROW_BYTES / item_bytes(known.dtype) if carry.narrow else 1.0)

    def _made_node(self, carry: Carry, value: int) -> int:
        """Adds the node of an op's result before it is moved to where it is stored.

        It occupies nothing where the op makes the result in the sharding in which it is stored.
        """
        key, (node, result) = ("made", carry), carry.source
        known = self._auxiliary.get(key)
        if known is not None:
            return known
        stored, (before, made) = self._tables.choices[carry.target].taken[0], self._made(node, result)
        # `_partial_node` counts a partial result that is reduced in its own place.
        kinds, kind = np.unique(np.where(before == made, -1, made), return_inverse=True)
        size = np.where(kinds >= 0, self._bytes(value, None)[kinds], 0.0)
        return self._excused(key, node, kind, size, [[(carry.target, stored[:, None] == kinds)]])

    def _partial_node(self, source: Source, memory: StepMemory) -> int:
        """Adds the node of an op's partial result, which is in memory before its reduction unless the op reduces it in place."""
        key = ("partial", source)
        known = self._auxiliary.get(key)
        if known is not None:
            return known
        value = self._space.graph.ops[self._network.nodes[source.node].member].results[source.result]
        size, (before, made) = self._bytes(value, None), self._made(*source)
        kinds, kind = np.unique(np.where((before == made) & bool(memory.settled[value]), -1, before), return_inverse=True)
        return self._excused(key, source.node, kind, np.where(kinds >= 0, size[kinds], 0.0), [])

    def _excused(self, key: tuple[object, ...], node: int, numbers: IntArray, size: FloatArray, ways: Sequence[_Way]) -> int:
        """Adds an auxiliary node for one whose states have `numbers`: each number once for every way to take no bytes, then with bytes.

        A way is open where all of its nodes, each with a table of its states by numbers, allow it.
        """
        same = np.where(np.eye(len(size), dtype=bool), 0.0, np.inf)[numbers]
        copy = self._add(key, node, self._shared(("same", id(numbers), len(size), len(ways)), np.hstack([same] * (len(ways) + 1))))
        self._usages[copy] = np.concatenate([*[np.zeros(len(size))] * len(ways), size])
        self._kept.append(numbers)
        for place, way in enumerate(ways):
            for other, allowed in way:
                shared = ("way", id(allowed), place, len(ways))
                parts = [np.zeros(allowed.shape)] * (len(ways) + 1)
                parts[place] = np.where(allowed, 0.0, np.inf)
                self._edges.append(Edge(other, copy, self._shared(shared, np.hstack(parts))))
                self._kept.append(allowed)
        return copy

    def _made(self, node: int, result: int) -> tuple[IntArray, IntArray]:
        """Returns for each state of an op the sharding of a partial result before its reduction (-1 if it is not partial), and after it."""
        choices = self._tables.choices[node]
        assert choices.split is not None
        assert choices.states is not None
        kinds = self._space.graph.ops[self._network.nodes[node].member].rule.kinds
        summed = [factor for factor, kind in enumerate(kinds) if kind is FactorKind.REDUCTION]
        is_partial = np.asarray((choices.split.rows[:, summed] > 0).any(axis=1))
        natural = choices.split.results[result][choices.states.split]
        return np.where(is_partial[choices.states.split], natural, -1), choices.stored[result]

    def _shared(self, key: tuple[object, ...], table: FloatArray) -> FloatArray:
        return self._memo.setdefault(key, table)


def _may_be_elsewhere(memory: StepMemory) -> set[int]:
    """Returns the products that may run last, unless they run last in any case."""
    last = len(memory.times) - 1
    return {one.op for one in memory.gradients if memory.times[one.op] != last}
