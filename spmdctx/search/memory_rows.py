"""The memory of a planning problem: what each node occupies in each state, and when.

Some nodes get company that costs nothing and is tied to them by an edge of zeros and infinities, because a node has one usage:
each result of an op with several results, the copy that a use makes where it is not as stored, and, where asked for, the copies that
an op makes for itself alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from spmdctx.domains import domain
from spmdctx.ir import FactorKind, item_bytes
from spmdctx.search.memory import Peak, StepMemory
from spmdctx.search.narrowing import NARROW_BYTES
from spmdctx.search.network import Carry, Network, Source
from spmdctx.search.solver.problem import Edge, FloatArray, IntArray, Life, Memory, Problem
from spmdctx.search.tables import Tables

_POSITIONS = 1 << 16
"""More than any op has operands."""


def with_memory(tables: Tables, problem: Problem, memory: StepMemory, limit: float, carries: Collection[Carry] = ()) -> Problem:
    """The problem with the budget `limit` in bytes; its states begin with those of the problem without it.

    Counted are values as they are stored, what uses gather, and the copies that `carries` bring to the ops that they lead to.
    """
    builder = _Builder(tables, problem)
    builder.add_values(memory)
    builder.add_copies(memory)
    builder.add_own_copies(memory, carries)
    return builder.problem(limit)


def carries_to(network: Network, memory: StepMemory, time: int) -> list[Carry]:
    """The edges into ops, and from them to slots, whose copies may be alive at an op."""
    ops = network.space.graph.ops
    classes = {network.folded.op_class[op.id] for op in ops if op.id <= time <= memory.times[op.id]}
    is_slot = [node.sort == "slot" for node in network.nodes]
    return [carry for carry in network.carries if carry.target in classes or (carry.source.node in classes and is_slot[carry.target])]


def counted_bytes(problem: Problem, states: Sequence[int]) -> float:
    """The most bytes alive at once in a choice of states, as the problem counts them."""
    memory = problem.memory
    if memory is None or not memory.lives:
        return 0.0
    lives = np.array([(start, end) for _, start, end in memory.lives], dtype=np.int64)
    sizes = np.array([memory.usages[node][states[node]] for node, _, _ in memory.lives])
    change = np.zeros(lives[:, 1].max() + 1)
    np.add.at(change, lives[:, 0], sizes)
    np.subtract.at(change, lives[:, 1], sizes)
    return float(np.cumsum(change).max())


def least_peak(problem: Problem) -> Peak:
    """The time at which most is alive if every node occupies as little as it can, and how much that is."""
    memory = problem.memory
    if memory is None or not memory.lives:
        return Peak(0, 0)
    lives = np.array(memory.lives, dtype=np.int64)
    least = np.array([usage.min() for usage in memory.usages])[lives[:, 0]]
    change = np.zeros(lives[:, 2].max() + 1)
    np.add.at(change, lives[:, 1], least)
    np.subtract.at(change, lives[:, 2], least)
    alive = np.cumsum(change)
    return Peak(int(alive.argmax()), int(alive.max()))


class _Builder:
    def __init__(self, tables: Tables, problem: Problem) -> None:
        self._tables, self._network, self._space = tables, tables.network, tables.space
        self._costs, self._edges = list(problem.costs), list(problem.edges)
        self._usages: list[FloatArray | None] = [None] * len(problem.costs)
        self._company: dict[tuple[int, int], int] = {}
        self._lives: list[Life] = []
        self._memo: dict[tuple[object, ...], FloatArray] = {}

    def problem(self, limit: float) -> Problem:
        """What was gathered."""
        nothing = [np.zeros(len(costs)) if usage is None else usage for costs, usage in zip(self._costs, self._usages, strict=True)]
        return Problem(tuple(self._costs), tuple(self._edges), Memory(tuple(nothing), tuple(self._lives), limit))

    def add_values(self, memory: StepMemory) -> None:
        """Every value that exists in memory, where it is stored."""
        network, space = self._network, self._space
        several: dict[int, int] = {}
        for value, start, end in memory.lives:
            slot = space.slot_of[value]
            if slot in space.loose_slots:
                continue
            slot_class = network.folded.slot_class[slot]
            if slot_class < 0:
                self._lives.append(Life(self._unread_node(value), start, end + 1))
                continue
            node = network.slot_nodes.get(slot_class)
            result = 0
            if node is None:
                maker = space.graph.producers.get(value)
                if maker is None or network.folded.op_class[maker] < 0:
                    continue
                node = network.folded.op_class[maker]
                result = space.graph.ops[maker].results.index(value)
            holder = several.setdefault(node, result)
            if holder != result:
                node = self._result_node(node, result)
            if self._usages[node] is None:
                self._usages[node] = self._bytes(value, self._stored(node, result))
            self._lives.append(Life(node, start, end + 1))

    def _stored(self, node: int, result: int) -> IntArray | None:
        """The shardings of a result per state; None for company, whose states are the domain."""
        return self._tables.choices[node].stored[result] if node < len(self._tables.choices) else None

    def _bytes(self, value: int, numbers: IntArray | None) -> FloatArray:
        """One device's bytes of a value per state; without numbers, for its whole domain."""
        known = self._space.graph.values[value]
        own = domain(self._space.mesh, known.shape)
        total = float(item_bytes(known.dtype) * math.prod(known.shape))
        return total / (own.slices if numbers is None else own.slices[numbers])

    def _unread_node(self, value: int) -> int:
        """A node of one state for an input that no op reads: every device holds it whole."""
        self._costs.append(np.zeros(1))
        self._usages.append(self._bytes(value, np.zeros(1, dtype=np.int64)))
        return len(self._costs) - 1

    def _result_node(self, node: int, result: int) -> int:
        """The company of an op for a further result: its states are the result's shardings."""
        known = self._company.get((node, result))
        if known is not None:
            return known
        op = self._space.graph.ops[self._network.nodes[node].member]
        count = len(domain(self._space.mesh, self._space.graph.values[op.results[result]].shape))
        stored = self._tables.choices[node].stored[result]
        same = np.where(np.eye(count, dtype=bool), 0.0, np.inf)
        return self._add((node, result), node, self._shared(("result", id(stored)), same[stored]))

    def _add(self, key: tuple[int, int], node: int, table: FloatArray) -> int:
        company = self._company[key] = len(self._costs)
        self._costs.append(np.zeros(table.shape[1]))
        self._usages.append(None)
        self._edges.append(Edge(node, company, table))
        return company

    def add_copies(self, memory: StepMemory) -> None:
        """What uses gather for their readers, from the first of them to the last."""
        network = self._network
        spans: dict[tuple[int, int], tuple[int, int]] = {}
        for op, scope in zip(self._space.graph.ops, network.scopes, strict=True):
            time = memory.times[op.id]
            for value in op.operands:
                if (value, scope) in network.uses:
                    start, end = spans.get((value, scope), (time, time))
                    spans[value, scope] = min(start, time), max(end, time)
        sources = {carry.target: carry.source for carry in network.carries if network.nodes[carry.target].sort == "use"}
        for key, node in network.uses.items():
            copy = self._copy_node(node, sources[node], key[0])
            start, end = spans[key]
            self._lives.append(Life(copy, start, end + 1))

    def add_own_copies(self, memory: StepMemory, carries: Collection[Carry]) -> None:
        """What ops make for themselves alone while they run: operands as they take them, and results before they are stored."""
        folded, nodes, ops = self._network.folded, self._network.nodes, self._space.graph.ops
        seen: set[tuple[int, int]] = set()
        for carry in carries:
            value = self._network.carries[carry].value
            into_op = nodes[carry.target].sort == "op"
            members = folded.op_members[carry.target if into_op else carry.source.node]
            if into_op or not memory.held[value]:
                copy = self._copy_node(carry.target, carry.source, value, carry.position, carry.narrow)
                for op in members:
                    # Ops that run together may read one copy.
                    taken = ops[op].operands[carry.position] if into_op else ops[op].results[carry.source.result]
                    if (taken, memory.times[op]) not in seen:
                        seen.add((taken, memory.times[op]))
                        self._lives.append(Life(copy, memory.times[op], memory.times[op] + 1))
            if not into_op:
                made = self._made_node(carry, value)
                self._lives += [Life(made, op, op + 1) for op in members]

    def _copy_node(self, node: int, source: Source, value: int, position: int = 0, narrow: bool = False) -> int:
        """The company of what takes a value: each sharding twice, first where it is a slice of what is stored, then as a copy."""
        known = self._company.get((node, ~position))
        if known is not None:
            return known
        stored, taken = self._tables.choices[source.node].stored[source.result], self._tables.choices[node].taken[position]
        known_value = self._space.graph.values[value]
        is_slice = self._tables.reshard_s(known_value.shape, 1)[stored] == 0.0
        size = self._bytes(value, None) * (NARROW_BYTES / item_bytes(known_value.dtype) if narrow else 1.0)
        copy = self._twice((node, ~position), node, taken, size)
        self._edges.append(Edge(source.node, copy, self._shared(("slice", id(stored), known_value.shape), _unless_copied(is_slice))))
        return copy

    def _made_node(self, carry: Carry, value: int) -> int:
        """The company of an op's result: how it is made, twice, first where it is stored so, then where it is moved.

        Partial results are in memory before their reduction, others where they are moved.
        """
        key = (carry.source.node, ~(carry.target + _POSITIONS))
        known = self._company.get(key)
        if known is not None:
            return known
        result, stored, size = carry.source.result, self._tables.choices[carry.target].taken[0], self._bytes(value, None)
        before, made = self._made(carry.source.node, result)
        kinds, kind = np.unique(np.stack([before, made], axis=1), axis=0, return_inverse=True)
        is_partial = kinds[:, 0] >= 0
        at_first = np.where(is_partial, size[kinds[:, 0]], 0.0)
        moved = at_first + np.where(is_partial & (kinds[:, 0] == kinds[:, 1]), 0.0, size[kinds[:, 1]])
        same = np.where(kind.reshape(-1)[:, None] == np.arange(len(kinds)), 0.0, np.inf)
        copy = self._add(key, carry.source.node, np.hstack([same, same]))
        self._usages[copy] = np.concatenate([at_first, moved])
        self._edges.append(Edge(carry.target, copy, _unless_copied(stored[:, None] == kinds[:, 1])))
        return copy

    def _made(self, node: int, result: int) -> tuple[IntArray, IntArray]:
        """Per state of an op: the sharding of a partial result before its reduction (-1 of others), and after it."""
        choices = self._tables.choices[node]
        assert choices.split is not None
        assert choices.states is not None
        kinds = self._space.graph.ops[self._network.nodes[node].member].rule.kinds
        summed = [factor for factor, kind in enumerate(kinds) if kind is FactorKind.REDUCTION]
        is_partial = np.asarray((choices.split.rows[:, summed] > 0).any(axis=1))
        split = choices.states.split
        return np.where(is_partial[split], choices.split.results[result][split], -1), choices.stored[result]

    def _twice(self, key: tuple[int, int], node: int, numbers: IntArray, num_bytes: FloatArray) -> int:
        """A company of `node`, whose states have `numbers`: each number first as no copy, then as one."""
        same = np.where(np.eye(len(num_bytes), dtype=bool), 0.0, np.inf)[numbers]
        copy = self._add(key, node, self._shared(("twice", id(numbers), len(num_bytes)), np.hstack([same, same])))
        self._usages[copy] = np.concatenate([np.zeros(len(num_bytes)), num_bytes])
        return copy

    def _shared(self, key: tuple[object, ...], table: FloatArray) -> FloatArray:
        return self._memo.setdefault(key, table)


def _unless_copied(is_free: NDArray[np.bool_]) -> FloatArray:
    """An edge from a node to company that has each state twice, in the first of which it makes no copy: possible where `is_free`."""
    return np.hstack([np.where(is_free, 0.0, np.inf), np.zeros(is_free.shape)])
