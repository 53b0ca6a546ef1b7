"""The memory of a planning problem: what each node occupies in each state, and when.

Two kinds of node get company that costs nothing and is tied to them by an edge of zeros and infinities, because a node has one
usage: each result of an op with several results, and the copy that a use makes where it is not as stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spmdctx.domains import domain
from spmdctx.ir import item_bytes
from spmdctx.search.memory import Peak, StepMemory
from spmdctx.search.network import Source
from spmdctx.search.solver.problem import Edge, FloatArray, IntArray, Life, Memory, Problem
from spmdctx.search.tables import Tables


def with_memory(tables: Tables, problem: Problem, memory: StepMemory, limit: float) -> Problem:
    """The problem with the budget `limit` in bytes; its states begin with those of the problem without it."""
    builder = _Builder(tables, problem)
    builder.add_values(memory)
    builder.add_copies(memory)
    return builder.problem(limit)


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

    def _copy_node(self, node: int, source: Source, value: int) -> int:
        """The company of a use: each sharding twice, first as stored, where nothing is copied, then as a copy of its own."""
        known = self._company.get((node, 0))
        if known is not None:
            return known
        stored = self._tables.choices[source.node].stored[source.result]
        count = len(domain(self._space.mesh, self._space.graph.values[value].shape))
        same = np.where(np.eye(count, dtype=bool), 0.0, np.inf)
        copy = self._add((node, 0), node, self._shared(("use", count), np.hstack([same, same])))
        as_stored = np.hstack([same[stored], np.zeros((len(stored), count))])
        self._edges.append(Edge(source.node, copy, self._shared(("source", id(stored)), as_stored)))
        self._usages[copy] = np.concatenate([np.zeros(count), self._bytes(value, None)])
        return copy

    def _shared(self, key: tuple[object, ...], table: FloatArray) -> FloatArray:
        return self._memo.setdefault(key, table)
