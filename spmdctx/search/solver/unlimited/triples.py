"""The bound by triples of nodes, which is tighter than that of edges, around the cycles on which the messages disagree.

Costs move between nodes, edges and triples so that every choice keeps its cost, while the sum of all minima rises: the dual of Sontag
and others, "Tightening LP relaxations for MAP using message passing" (2008). The triples come from an elimination order of the nodes
that are not decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import combinations
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.unlimited.dual import Bound, Dual

MAX_WIDTH = 6
"""A node with more neighbours than this in the order forms no triples with them."""
MAX_ENTRIES = 200_000
"""The most entries of one triple."""
PAIR = (1.0 / 2.0, 1.0 / 3.0, 1.0 / 2.0)
"""The share of the rest that each edge of a triple gets in turn, the edge of the two later nodes first; the last two get equal parts."""

SEND_WORK = 4000
"""Additions that take as long as sending costs along one small table, forward and backward."""

_ENDS = ((0, (None,)), (2, (slice(None), slice(None), None)), (1, (slice(None), None)))
"""For each edge of a triple the axis of the third node, and how a table of the edge becomes one of all three."""

_Pair = tuple[int, int]


class _Triple(NamedTuple):
    """Edges by number: the edge of the two later nodes, then those of the first node to each of them.

    `turned` says for each whether its table is the other way round, `given` the costs that the triple gave to it.
    """

    edges: list[int]
    turned: list[bool]
    given: list[FloatArray]


class Triples:
    """The costs of one graph, spread over nodes, edges and triples. Any spread gives a valid bound; `run` improves it.

    A table is [state of the earlier node, state of the later node], in the order of the dual's nodes.
    """

    def __init__(self, graph: CostGraph, dual: Dual, forbidden: float) -> None:
        """Starts from the messages of a dual of the graph, without triples.

        `forbidden`, which is more than any gap, stands for infinite costs.
        """
        self._nodes = dual.nodes
        self._rank = {node: place for place, node in enumerate(self._nodes)}
        self._forbidden = forbidden
        self._number: dict[_Pair, int] = {}
        self._pairs: list[_Pair] = []
        self._tables: list[FloatArray] = []
        self._near: dict[int, tuple[list[int], list[int]]] = {node: ([], []) for node in self._nodes}
        self._triples: dict[frozenset[int], _Triple] = {}
        self._passes = 0
        self._sizes = {node: graph.size(node) for node in self._nodes}
        self._kept = {node: np.arange(size) for node, size in self._sizes.items()}
        self._costs = {node: graph.costs(node) + sum(dual.message(other, node) for other in graph.links[node]) for node in self._nodes}
        for node in self._nodes:
            for other, number in sorted(graph.links[node].items()):
                if self._rank[node] < self._rank[other]:
                    table = np.minimum(graph.pool.arrays[number], forbidden)
                    self._edge(node, other, table - dual.message(other, node)[:, None] - dual.message(node, other))

    @property
    def work(self) -> int:
        """Returns about how many additions one pass takes."""
        return SEND_WORK * len(self._tables) + sum(
            sum(given.size for given in own.given) * len(own.given[1]) for own in self._triples.values()
        )

    def cover(self, undecided: dict[int, int], max_entries: int) -> None:
        """Adds triples of nodes for which several states look best, at most `max_entries` in all.

        `undecided` gives the number of these states by node.
        """
        near: dict[int, set[int]] = {node: set() for node in undecided}
        for node, other in self._pairs:
            if node in near and other in near:
                near[node].add(other)
                near[other].add(node)
        sizes = {node: len(costs) for node, costs in self._costs.items()}
        for found in _cover(near, undecided):
            entries = sizes[found[0]] * sizes[found[1]] * sizes[found[2]]
            key = frozenset(found)
            if entries <= min(MAX_ENTRIES, max_entries) and key not in self._triples:
                max_entries -= entries
                self._triples[key] = self._triple(*found)

    def _triple(self, first: int, second: int, third: int) -> _Triple:
        edges, turned = [], []
        for pair in ((second, third), (first, second), (first, third)):
            node, other = sorted(pair, key=self._rank.__getitem__)
            edges.append(self._edge(node, other, np.zeros((len(self._costs[node]), len(self._costs[other])))))
            turned.append(pair != (node, other))
        return _Triple(edges, turned, [np.zeros(self._view(*own).shape) for own in zip(edges, turned, strict=True)])

    def _view(self, number: int, turned: bool) -> FloatArray:
        return self._tables[number].T if turned else self._tables[number]

    def restrict(self, most: float) -> bool:
        """Leaves out the states whose bound is above `most`, and so every choice with one of them.

        Returns False if a node has none left.
        """
        beliefs = self.bound().beliefs
        kept = {node: np.flatnonzero(beliefs[node][self._kept[node]] <= most) for node in self._nodes}
        if any(not len(states) for states in kept.values()):
            return False
        self._kept = {node: self._kept[node][states] for node, states in kept.items()}
        self._costs = {node: costs[kept[node]] for node, costs in self._costs.items()}
        chosen = [np.ix_(kept[node], kept[other]) for node, other in self._pairs]
        self._tables = [table[chosen[number]] for number, table in enumerate(self._tables)]
        for own in self._triples.values():
            for place, (edge, turned) in enumerate(zip(own.edges, own.turned, strict=True)):
                given = own.given[place]
                own.given[place] = given.T[chosen[edge]].T if turned else given[chosen[edge]]
        return True

    def _edge(self, node: int, other: int, table: FloatArray) -> int:
        """Returns the number of an edge; a new edge gets this table."""
        number = self._number.setdefault((node, other), len(self._tables))
        if number == len(self._tables):
            self._tables.append(table)
            self._pairs.append((node, other))
            self._near[node][1].append(number)
            self._near[other][0].append(number)
        return number

    def run(self, num_passes: int) -> None:
        """Pools each triple, then sends costs along all edges forward and backward, `num_passes` times; the bound hardly ever falls."""
        pooled = sorted({edge for triple in self._triples.values() for edge in triple.edges})
        for _ in range(num_passes):
            shares = self._shares(pooled)
            for triple in self._triples.values():
                self._pool(triple, shares)
            for node in self._nodes:
                self._send(node, forward=True)
            for node in reversed(self._nodes):
                self._send(node, forward=False)
        self._passes += num_passes

    def _send(self, node: int, forward: bool) -> None:
        """Gives a node's neighbours ahead the costs that its share and the edge cause at least."""
        behind, ahead = self._near[node]
        share = self._costs[node] / max(len(behind), len(ahead), 1)
        for number in ahead if forward else behind:
            table = self._tables[number]
            sent = (table + share[:, None]).min(axis=0) if forward else (table + share).min(axis=1)
            table -= sent if forward else sent[:, None]
            self._costs[self._pairs[number][forward]] += sent

    def _left(self, triple: _Triple) -> FloatArray:
        """Returns the cost that a triple has left after its gifts to its edges, as [first, second, third node]."""
        later, second, third = triple.given
        left: FloatArray = -(second[:, :, None] + third[:, None, :])
        left -= later
        return left

    def _pool(self, triple: _Triple, every: Mapping[int, FloatArray]) -> None:
        """Pools the costs of a triple's edges, and gives each edge its part of the minima; `every` are the shares of edges."""
        sides = list(zip(triple.edges, triple.turned, strict=True))
        shares = [every[number].T if turned else every[number] for number, turned in sides]
        tables = [self._view(number, turned) for number, turned in sides]
        later, second, third = (table + share - given for table, share, given in zip(tables, shares, triple.given, strict=True))
        left = second[:, :, None] + third[:, None, :]
        left += later
        for place, (axis, back) in enumerate(_ENDS):
            part = np.minimum.reduce(left, axis=axis)
            part *= PAIR[place]
            left -= part[back]
            part -= shares[place]
            triple.given[place] += part - tables[place]
            tables[place][...] = part

    def _shares(self, edges: Iterable[int]) -> dict[int, FloatArray]:
        """Returns the shares of edges in the costs of their nodes."""
        own = {node: costs / sum(map(len, self._near[node])) for node, costs in self._costs.items() if any(self._near[node])}
        return {number: own[self._pairs[number][0]][:, None] + own[self._pairs[number][1]] for number in edges}

    def bound(self) -> Bound:
        """Returns the bound of the present spread."""
        # After a backward pass a node's costs belong in equal shares to its edges to the nodes before.
        shares = {node: self._costs[node] / max(*map(len, self._near[node]), 1) for node in self._nodes}
        own = {node: self._costs[node] - len(self._near[node][0]) * shares[node] for node in self._nodes}
        beliefs = {node: costs - costs.min() for node, costs in own.items()}
        value = float(sum(costs.min() for costs in own.values())) - self._rounding()
        for number, (node, other) in enumerate(self._pairs):
            table = self._tables[number] + shares[other]
            rows, columns, least = table.min(axis=1), table.min(axis=0), float(table.min())
            value += least
            beliefs[node] += rows - least
            beliefs[other] += columns - least
        value += sum(float(self._left(triple).min()) for triple in self._triples.values())
        full = {node: np.full(size, np.inf) for node, size in self._sizes.items()}
        for node, belief in beliefs.items():
            full[node][self._kept[node]] = belief + value
        return Bound(value, full)

    def _rounding(self) -> float:
        """Returns more than the error of all additions to the costs of a choice that is not forbidden."""
        sizes = sum(float(np.abs(costs).max()) for costs in self._costs.values())
        sizes += sum(float(np.abs(table).max(initial=0.0, where=table < self._forbidden / 2)) for table in self._tables)
        return float(16 * np.finfo(np.float64).eps * (self._passes + 1) * sizes)


def _cover(near: dict[int, set[int]], sizes: dict[int, int]) -> list[tuple[int, int, int]]:
    """Returns the triples of an elimination order: each node with two neighbours at its turn. Uses up `near`."""
    found: list[tuple[int, int, int]] = []
    keys = {node: (len(around), _product(sizes, around), node) for node, around in near.items()}
    queue = sorted(keys.values())
    while queue:
        key = heappop(queue)
        node = key[2]
        if keys.get(node) != key:
            continue
        del keys[node]
        around = near.pop(node)
        for other in around:
            near[other].discard(node)
        if len(around) <= MAX_WIDTH:
            for second, third in combinations(sorted(around), 2):
                found.append((node, second, third))
                near[second].add(third)
                near[third].add(second)
        for other in around:
            changed = len(near[other]), _product(sizes, near[other]), other
            if changed != keys[other]:
                keys[other] = changed
                heappush(queue, changed)
    return found


def _product(sizes: dict[int, int], nodes: set[int]) -> float:
    product = 1.0
    for node in nodes:
        product *= sizes[node]
    return product
