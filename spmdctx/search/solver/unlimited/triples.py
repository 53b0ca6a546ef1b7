"""A tighter bound where edges alone leave a gap: triples of nodes around the cycles on which the messages disagree.

Costs move between nodes, edges and triples so that every choice keeps its cost, while the sum of all minima rises: the dual of Sontag
and others, "Tightening LP relaxations for MAP using message passing" (2008), with triples from an elimination order of the nodes that
are not decided.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.unlimited.dual import Bound, Dual

MAX_WIDTH = 6
"""Nodes with more neighbours in the order are in no triple with two of them."""
MAX_ENTRIES = 200_000
"""Entries of one triple."""
PAIR = (1.0 / 2.0, 1.0 / 3.0, 1.0 / 2.0)
"""What each edge of a triple is given of what is left, that of the two later nodes first: half, and an equal share of the rest."""

SEND_WORK = 4000
"""Additions in the time that sending costs along one small table takes, forward and backward."""

_Pair = tuple[int, int]


class _Triple(NamedTuple):
    """Edges by number: that of the two later nodes, and of the first to each of them; whether their tables are the other way round.

    `given` is what the triple gave to each.
    """

    edges: list[int]
    turned: list[bool]
    given: list[FloatArray]


class Triples:
    """Costs of one graph, spread over nodes, edges and triples. Any spread gives a valid bound; `run` improves it.

    A table is [state of the earlier node, state of the later node], in the order of the dual's nodes.
    """

    def __init__(self, graph: CostGraph, dual: Dual, forbidden: float) -> None:
        """Starts from the messages of a dual of the graph, without triples; `forbidden`, more than any gap, stands for infinite costs."""
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
        """About how many additions one pass takes."""
        return SEND_WORK * len(self._tables) + sum(
            sum(given.size for given in own.given) * len(own.given[1]) for own in self._triples.values()
        )

    def cover(self, undecided: dict[int, int], max_entries: int) -> None:
        """Adds triples of nodes of which several states look best, as many as `undecided` says; at most `max_entries` in all."""
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
        """Leaves out the states of which the bound is above `most`, and so every choice with one of them; False if that leaves none."""
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
        """The number of an edge, which has this table if it is new."""
        number = self._number.setdefault((node, other), len(self._tables))
        if number == len(self._tables):
            self._tables.append(table)
            self._pairs.append((node, other))
            self._near[node][1].append(number)
            self._near[other][0].append(number)
        return number

    def run(self, num_passes: int) -> None:
        """Sends costs along all edges forward and backward, then pools each triple, `num_passes` times; the bound hardly ever falls."""
        for _ in range(num_passes):
            for triple in self._triples.values():
                self._pool(triple)
            for node in self._nodes:
                self._send(node, forward=True)
            for node in reversed(self._nodes):
                self._send(node, forward=False)
        self._passes += num_passes

    def _send(self, node: int, forward: bool) -> None:
        """Gives a node's neighbours ahead what they cost at least on account of its share and of their edge."""
        behind, ahead = self._near[node]
        share = self._costs[node] / max(len(behind), len(ahead), 1)
        for number in ahead if forward else behind:
            table = self._tables[number]
            sent = (table + share[:, None]).min(axis=0) if forward else (table + share).min(axis=1)
            table -= sent if forward else sent[:, None]
            self._costs[self._pairs[number][forward]] += sent

    def _left(self, triple: _Triple) -> FloatArray:
        """Returns the cost of a triple beyond what it has given, [first, second, third node]."""
        later, second, third = triple.given
        left: FloatArray = -(second[:, :, None] + third[:, None, :])
        left -= later
        return left

    def _pool(self, triple: _Triple) -> None:
        """Puts together the costs of a triple's edges, and gives each of them its part of the minima."""
        sides = list(zip(triple.edges, triple.turned, strict=True))
        shares = [self._share(number).T if turned else self._share(number) for number, turned in sides]
        tables = [self._view(number, turned) for number, turned in sides]
        later, second, third = (table + share - given for table, share, given in zip(tables, shares, triple.given, strict=True))
        left = second[:, :, None] + third[:, None, :]
        left += later
        for place, axis in enumerate((0, 2, 1)):
            part = left.min(axis=axis)
            part *= PAIR[place]
            left -= np.expand_dims(part, axis)
            part -= shares[place]
            triple.given[place] += part - tables[place]
            tables[place][...] = part

    def _share(self, number: int) -> FloatArray:
        """Returns the share of an edge in the costs of its nodes."""
        node, other = self._pairs[number]
        of_node, of_other = self._costs[node] / sum(map(len, self._near[node])), self._costs[other] / sum(map(len, self._near[other]))
        share: FloatArray = of_node[:, None] + of_other
        return share

    def bound(self) -> Bound:
        """The bound of the present spread."""
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
        """More than the error of all additions to the costs of a choice that is not forbidden."""
        sizes = sum(float(np.abs(costs).max()) for costs in self._costs.values())
        sizes += sum(float(np.abs(table).max(initial=0.0, where=table < self._forbidden / 2)) for table in self._tables)
        return float(16 * np.finfo(np.float64).eps * (self._passes + 1) * sizes)


def _cover(near: dict[int, set[int]], sizes: dict[int, int]) -> list[tuple[int, int, int]]:
    """The nodes in an order of elimination, each with two neighbours at its turn. Uses up `near`."""
    found: list[tuple[int, int, int]] = []
    while near:
        node = min(near, key=lambda node: (len(near[node]), _product(sizes, near[node]), node))
        around = near.pop(node)
        for other in around:
            near[other].discard(node)
        if len(around) > MAX_WIDTH:
            continue
        for second, third in combinations(sorted(around), 2):
            found.append((node, second, third))
            near[second].add(third)
            near[third].add(second)
    return found


def _product(sizes: dict[int, int], nodes: set[int]) -> float:
    product = 1.0
    for node in nodes:
        product *= sizes[node]
    return product
