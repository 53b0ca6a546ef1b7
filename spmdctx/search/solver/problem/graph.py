"""The problem as a graph of interned costs, and the exact steps that make the graph smaller."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.search.solver.problem.pool import Pool
from spmdctx.search.solver.problem.problem import Edge

PEEL_WORK = 40_000_000
"""The limit on the additions that removing one node with two neighbours takes."""


class Peeled(NamedTuple):
    """A removed node: its best state follows from its neighbours' states."""

    node: int
    unary: int
    links: tuple[tuple[int, int], ...]


class Kept(NamedTuple):
    """A node that kept only some of its states."""

    node: int
    states: IntArray


class CostGraph:
    """Pairwise costs over the nodes that are left.

    `unary[v]` is the pool's number for the costs of node v, `links[v][u]` its number for the table [state of v, state of u].
    `origin[v]` lists the original states that node v still has. `base` is a constant cost; `history` lists the removals in order.
    """

    def __init__(self, pool: Pool, unary: list[int], links: list[dict[int, int]], origin: list[IntArray]) -> None:
        self.pool = pool
        self.unary = unary
        self.links = links
        self.origin = origin
        self.alive = [True] * len(unary)
        self.base = 0.0
        self.history: list[Peeled | Kept] = []
        self._stays: Sequence[bool] | None = None

    @classmethod
    def of(cls, costs: Sequence[FloatArray], edges: Sequence[Edge], pool: Pool) -> CostGraph:
        """Builds the graph of a problem: parallel edges are summed, and an edge from a node to itself joins the node's costs."""
        unary = [pool.intern_object(array) for array in costs]
        ranges: dict[int, IntArray] = {}
        origin = [ranges.setdefault(len(array), np.arange(len(array))) for array in costs]
        graph = cls(pool, unary, [{} for _ in costs], origin)
        for left, right, table in edges:
            number = pool.intern_object(table)
            if left == right:
                graph.add_unary(left, pool.intern(np.ascontiguousarray(np.diagonal(pool.arrays[number]))))
            else:
                graph.link(left, right, number)
        return graph

    def copy(self) -> CostGraph:
        """Copies the graph, so that it can be changed alone.

        The pool is shared; the copy's `complete` gives present states of this graph.
        """
        other = CostGraph(self.pool, list(self.unary), [dict(links) for links in self.links], list(self.origin))
        other.alive = list(self.alive)
        other.base = self.base
        return other

    def nodes(self) -> list[int]:
        """Lists the nodes that are left."""
        return [node for node, alive in enumerate(self.alive) if alive]

    def size(self, node: int) -> int:
        """Returns the number of states that a node has left."""
        return len(self.pool.arrays[self.unary[node]])

    def costs(self, node: int) -> FloatArray:
        """Returns the costs of a node's states."""
        return self.pool.arrays[self.unary[node]]

    def table(self, left: int, right: int) -> FloatArray:
        """Returns the table of an edge as [state of left, state of right]."""
        return self.pool.arrays[self.links[left][right]]

    def add_unary(self, node: int, number: int) -> None:
        """Adds costs to the states of a node."""
        self.unary[node] = self.pool.total(self.unary[node], number)

    def link(self, left: int, right: int, number: int) -> None:
        """Adds a table [state of left, state of right] between two nodes."""
        present = self.links[left].get(right)
        if present is not None:
            # The sum is formed in one orientation, so that both directions stay transposes of each other.
            number = self.pool.total(present, number)
        self.links[left][right] = number
        self.links[right][left] = self.pool.transposed(number)

    def unlink(self, left: int, right: int) -> None:
        """Removes an edge."""
        del self.links[left][right], self.links[right][left]

    def restrict(self, kept: dict[int, IntArray]) -> None:
        """Leaves each node of `kept` only the given ones of its present states."""
        pool = self.pool
        choices = {node: pool.choice(states) for node, states in kept.items()}
        for node, choice in choices.items():
            states = pool.choices[choice]
            self.unary[node] = pool.intern(self.costs(node)[states])
            self.origin[node] = self.origin[node][states]
            self.history.append(Kept(node, states))
        for node, choice in choices.items():
            for other, number in list(self.links[node].items()):
                second = choices.get(other, -1)
                if second < 0 or node < other:
                    number = pool.selected(number, choice, second)
                    self.links[node][other] = number
                    self.links[other][node] = pool.transposed(number)

    def peel(self, stays: Sequence[bool] | None = None) -> None:
        """Removes nodes with one state or with at most two neighbours, which keeps the costs pairwise and the optimum exact.

        Nodes of several states that are true in `stays` are left.
        """
        self._stays = stays
        queue = [(self._weight(node), node) for node in self.nodes()]
        queue = [entry for entry in queue if entry[0] >= 0]
        heapify(queue)
        while queue:
            weight, node = heappop(queue)
            if not self.alive[node] or self._weight(node) != weight:
                continue
            neighbours = list(self.links[node])
            self._remove(node)
            for other in neighbours:
                weight = self._weight(other)
                if weight >= 0:
                    heappush(queue, (weight, other))

    def _weight(self, node: int) -> int:
        """Returns the additions that removing a node takes, -1 if it must stay."""
        size, links = self.size(node), self.links[node]
        if size == 1:
            return 0
        if len(links) > 2 or (self._stays is not None and self._stays[node]):
            return -1
        for other in links:
            size *= self.size(other)
        return size if size <= PEEL_WORK else -1

    def _remove(self, node: int) -> None:
        pool, links = self.pool, tuple(sorted(self.links[node].items()))
        self.history.append(Peeled(node, self.unary[node], links))
        for other, _ in links:
            self.unlink(node, other)
        self.alive[node] = False
        if self.size(node) == 1 or not links:
            self.base += float(self.costs(node).min())
            for other, number in links:
                self.add_unary(other, pool.row(number, 0))
        elif len(links) == 1:
            number, lowest = pool.best(self.unary[node], (links[0][1],))
            self.base += lowest
            self.add_unary(links[0][0], number)
        else:
            (first, one), (second, two) = links
            number, lowest = pool.best(self.unary[node], (one, two))
            self.base += lowest
            parts = pool.parts(number)
            if parts is None:
                self.link(first, second, number)
            else:
                self.add_unary(first, parts[0])
                self.add_unary(second, parts[1])

    def split(self) -> None:
        """Turns every table that is a sum of a row and a column into costs of its two nodes."""
        for node in self.nodes():
            for other, number in sorted(self.links[node].items()):
                if node < other:
                    parts = self.pool.parts(number)
                    if parts is not None:
                        self.unlink(node, other)
                        self.add_unary(node, parts[0])
                        self.add_unary(other, parts[1])

    def complete(self, states: Sequence[int]) -> list[int]:
        """Returns the original states of all nodes, given the present states of the nodes that are left.

        States of removed nodes are ignored.
        """
        arrays, first = self.pool.arrays, list(states)
        for step in reversed(self.history):
            if isinstance(step, Kept):
                first[step.node] = int(step.states[first[step.node]])
                continue
            costs = arrays[step.unary]
            for other, number in step.links:
                costs = costs + arrays[number][:, first[other]]
            first[step.node] = int(costs.argmin())
        return first


def is_whole(graph: CostGraph) -> bool:
    """Returns whether all costs are whole numbers, so small that sums of them are exact."""
    numbers = {*graph.unary, *(number for links in graph.links for number in links.values())}
    arrays = [graph.pool.arrays[number] for number in sorted(numbers)]
    whole = all(((array == np.floor(array)) | np.isinf(array)).all() for array in arrays)
    most = sum(float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array))) for array in arrays)
    return whole and graph.base == np.floor(graph.base) and most * len(graph.unary) < 2**53


def cost_of(costs: Sequence[FloatArray], edges: Sequence[Edge], states: Sequence[int]) -> float:
    """Returns the cost of a choice of states, without any memory."""
    total = sum(float(array[state]) for array, state in zip(costs, states, strict=True))
    return total + sum(float(table[states[left], states[right]]) for left, right, table in edges)
