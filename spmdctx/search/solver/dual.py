"""A lower bound by sequential reparametrisation (Kolmogorov's TRW-S, 2006), many edges at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from spmdctx.search.solver.graph import Graph
from spmdctx.search.solver.groups import Groups
from spmdctx.search.solver.problem import FloatArray, IntArray

SMALL_TABLE = 2048
"""Tables of at most this many entries are stacked even if they differ."""
CHUNK = 1 << 20
MAX_NUMBERED = 1000
"""Nodes up to which they send in the order of their numbers, which takes the fewest sweeps."""


class Batch(NamedTuple):
    """Edges of one shape whose messages are sent at once, from `left` to `right`.

    `left`, `right` index the flat state arrays, [edge, state]; `into_left`, `into_right` the flat messages; `share` is the weight of the
    sender; `tables` is [edge or 1, state of left, state of right], or with `groups` those of the one table that all edges share;
    `is_apart` where no two edges have one receiver.
    """

    left: IntArray
    right: IntArray
    into_left: IntArray
    into_right: IntArray
    share: FloatArray
    tables: FloatArray
    groups: Groups | None
    is_apart: bool


class Single(NamedTuple):
    """A batch of one edge: slices of the flat states and messages, which cost less than lists of indices."""

    left: slice
    right: slice
    into_left: slice
    into_right: slice
    share: float
    table: FloatArray
    groups: Groups | None


class Bound(NamedTuple):
    """A cost that nothing goes below, and for every node a cost that nothing with that state goes below."""

    value: float
    beliefs: dict[int, FloatArray]


class Dual:
    """Messages on the edges of a graph. Any messages give a valid bound; `sweep` improves it.

    All costs must be finite where a state is alone, and every state must have a finite entry with each neighbour.
    """

    def __init__(self, graph: Graph, before: Dual | None = None, kept: Mapping[int, IntArray] | None = None) -> None:
        """Messages that say nothing yet; or where its states are those `kept` of the graph of `before`, that one's messages."""
        self._graph = graph
        self.nodes = _ordered(graph)
        self._rank = {node: rank for rank, node in enumerate(self.nodes)}
        self._start, start = {}, 0
        for node in self.nodes:
            self._start[node] = start
            start += graph.size(node)
        self._costs: FloatArray = np.concatenate([graph.costs(node) for node in self.nodes]) if self.nodes else np.zeros(0)
        rank = self._rank
        self._edges = [(node, other) for node in self.nodes for other in sorted(graph.links[node]) if rank[node] < rank[other]]
        self._message: dict[tuple[int, int], int] = {}
        length = 0
        for node, other in self._edges:
            for sender, receiver in ((node, other), (other, node)):
                self._message[sender, receiver] = length
                length += graph.size(receiver)
        self._messages: FloatArray = np.zeros(length)
        self._owner: IntArray = np.zeros(length, dtype=np.int64)
        for (_, receiver), at in self._message.items():
            size, first = graph.size(receiver), self._start[receiver]
            self._owner[at : at + size] = np.arange(first, first + size)
        self._forward = [_narrowed(batch) for batch in self._batches(self._levels(forward=True), forward=True)]
        self._backward = [_narrowed(batch) for batch in self._batches(self._levels(forward=False), forward=False)]
        self._all = self._batches(dict.fromkeys(self.nodes, 0), forward=True)
        self._sizes = [graph.size(node) for node in self.nodes]
        behind = [sum(rank[other] < rank[node] for other in graph.links[node]) for node in self.nodes]
        shares = np.array([1.0 / self._chains(node) for node in self.nodes])
        self._share = np.repeat(shares, self._sizes)
        self._own = np.repeat(1.0 - shares * np.array(behind), self._sizes)
        self._firsts = np.array([self._start[node] for node in self.nodes], dtype=np.int64)
        if before is not None and kept is not None:
            self._inherit(before, kept)

    def _inherit(self, before: Dual, kept: Mapping[int, IntArray]) -> None:
        for edge, at in self._message.items():
            start = before._message.get(edge)
            states = kept[edge[1]]
            if start is not None and len(states) == self._graph.size(edge[1]):
                self._messages[at : at + len(states)] = before._messages[start + states]

    def _levels(self, forward: bool) -> dict[int, int]:
        """Nodes of one level send after all of lower levels have sent, and not to each other."""
        level = dict.fromkeys(self.nodes, 0)
        for node in self.nodes if forward else reversed(self.nodes):
            for other in self._graph.links[node]:
                if (self._rank[node] < self._rank[other]) == forward:
                    level[other] = max(level[other], level[node] + 1)
        return level

    def _batches(self, level: dict[int, int], forward: bool) -> list[Batch]:
        graph = self._graph
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for first, second in self._edges:
            node, other = (first, second) if forward else (second, first)
            shape = graph.table(node, other).shape
            same = graph.links[node][other] if shape[0] * shape[1] > SMALL_TABLE else -1
            groups.setdefault((level[node], *shape, same), []).append((node, other))
        return [self._batch(groups[key]) for key in sorted(groups)]

    def _batch(self, edges: list[tuple[int, int]]) -> Batch:
        graph = self._graph
        shape = graph.table(*edges[0]).shape
        lefts, rights = np.arange(shape[0]), np.arange(shape[1])

        def at(starts: list[int], states: IntArray) -> IntArray:
            indices: IntArray = np.array(starts, dtype=np.int64)[:, None] + states
            return indices

        numbers = [graph.links[node][other] for node, other in edges]
        groups = graph.pool.groups(numbers[0]) if len(set(numbers)) == 1 else None
        tables = [graph.pool.arrays[number] for number in (numbers if len(set(numbers)) > 1 else numbers[:1])]
        if groups is not None:
            tables = [groups.small]
        return Batch(
            at([self._start[node] for node, _ in edges], lefts),
            at([self._start[other] for _, other in edges], rights),
            at([self._message[other, node] for node, other in edges], lefts),
            at([self._message[node, other] for node, other in edges], rights),
            np.array([[1.0 / self._chains(node)] for node, _ in edges]),
            np.stack(tables) if len(tables) > 1 else tables[0][None],
            groups,
            len({other for _, other in edges}) == len(edges),
        )

    def _chains(self, node: int) -> int:
        ahead = sum(self._rank[other] > self._rank[node] for other in self._graph.links[node])
        return max(ahead, len(self._graph.links[node]) - ahead, 1)

    def message(self, sender: int, receiver: int) -> FloatArray:
        """What a node says to a neighbour about each of that one's states."""
        at = self._message[sender, receiver]
        return self._messages[at : at + self._graph.size(receiver)]

    def add(self, node: int, costs: FloatArray) -> None:
        """Adds to the costs of a node's states."""
        start = self._start[node]
        self._costs[start : start + len(costs)] += costs

    def _totals(self) -> FloatArray:
        """Costs of the states with all messages that they receive."""
        return self._costs + np.bincount(self._owner, self._messages, len(self._costs))

    def sweep(self, num_sweeps: int, expired: Callable[[], bool]) -> None:
        """Sends messages along all edges forward and backward, `num_sweeps` times; the bound does not fall."""
        for _ in range(num_sweeps):
            for batches in (self._forward, self._backward):
                if expired():
                    return
                totals = self._totals()
                for batch in batches:
                    if isinstance(batch, Single):
                        self._send_one(batch, totals)
                    else:
                        self._send(batch, totals)

    def _send_one(self, edge: Single, totals: FloatArray) -> None:
        messages = self._messages
        known = edge.share * totals[edge.left] - messages[edge.into_left]
        groups = edge.groups
        if groups is not None:
            known = np.minimum.reduceat(known.take(groups.rows.order), groups.rows.starts)
        sent = np.minimum.reduce(edge.table + known[:, None], axis=0)
        sent -= np.minimum.reduce(sent)
        if groups is not None:
            sent = sent.take(groups.columns.of)
        before = messages[edge.into_right]
        totals[edge.right] += sent - before
        before[:] = sent

    def _send(self, batch: Batch, totals: FloatArray) -> None:
        known = batch.share * totals[batch.left] - self._messages[batch.into_left]
        sent = _least(batch.tables, known, batch.groups)
        # Only differences matter; this keeps the numbers small.
        sent -= np.minimum.reduce(sent, axis=1, keepdims=True)
        change = sent - self._messages[batch.into_right]
        if batch.is_apart:
            totals[batch.right] += change
        else:
            np.add.at(totals, batch.right, change)
        self._messages[batch.into_right] = sent

    def bound(self) -> Bound:
        """The bound of the present messages."""
        if not self.nodes:
            return Bound(0.0, {})
        totals = self._totals()
        # After a backward pass a node's costs belong in equal shares to its edges to the nodes before.
        beliefs = totals * self._own
        lowest = np.minimum.reduceat(beliefs, self._firsts)
        value = float(lowest.sum()) - self._rounding(totals)
        beliefs -= np.repeat(lowest, np.diff(self._firsts, append=len(totals)))
        for batch in self._all:
            into_left = self._messages[batch.into_left]
            into_right = self._messages[batch.into_right] - (totals * self._share)[batch.right]
            rows = _least_of_rows(batch.tables, into_right, batch.groups) - into_left
            columns = _least(batch.tables, -into_left, batch.groups) - into_right
            least = rows.min(axis=1, keepdims=True)
            value += float(least.sum())
            np.add.at(beliefs, batch.left, rows - least)
            np.add.at(beliefs, batch.right, columns - least)
        beliefs += value
        return Bound(value, {node: beliefs[start : start + self._graph.size(node)] for node, start in self._start.items()})

    def _rounding(self, totals: FloatArray) -> float:
        """More than the error of the bound's additions."""
        sizes = np.abs(np.minimum.reduceat(totals, self._firsts)).sum() + np.maximum.reduceat(totals, self._firsts).sum()
        return float(8 * np.finfo(np.float64).eps * (sizes + np.abs(self._messages).sum()))

    def decode(self) -> list[int]:
        """States chosen one node after the other, by the costs to the nodes before and the messages of the nodes after."""
        totals = self._totals()
        for batch in self._forward:
            if isinstance(batch, Single):
                known = _rows(batch.table[None], np.array([totals[batch.left].argmin()]), batch.groups)[0]
                totals[batch.right] += known - self._messages[batch.into_right]
                continue
            chosen = totals[batch.left].argmin(axis=1)
            known = _rows(batch.tables, chosen, batch.groups)
            np.add.at(totals, batch.right, known - self._messages[batch.into_right])
        states = [0] * len(self._graph.unary)
        for start, size, node in zip(self._firsts.tolist(), self._sizes, self.nodes, strict=True):
            states[node] = int(totals[start : start + size].argmin())
        return states


def _narrowed(batch: Batch) -> Batch | Single:
    """A batch of one edge as such."""
    if len(batch.left) > 1:
        return batch
    places = [slice(int(own[0, 0]), int(own[0, -1]) + 1) for own in batch[:4]]
    return Single(places[0], places[1], places[2], places[3], float(batch.share[0, 0]), batch.tables[0], batch.groups)


def _ordered(graph: Graph) -> list[int]:
    """The order in which nodes send: as they are numbered, or for many nodes by colour, so that most can send at once."""
    nodes = graph.nodes()
    if len(nodes) <= MAX_NUMBERED:
        return nodes
    colours: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: (-len(graph.links[node]), node)):
        taken = {colours[other] for other in graph.links[node] if other in colours}
        colour = 0
        while colour in taken:
            colour += 1
        colours[node] = colour
    return sorted(nodes, key=lambda node: (-colours[node], node))


def _rows(tables: FloatArray, chosen: IntArray, groups: Groups | None) -> FloatArray:
    """One row of each table, [edge, column]."""
    if groups is not None:
        chosen = groups.rows.of[chosen]
    rows: FloatArray = tables[np.arange(len(chosen)), chosen] if len(tables) > 1 else tables[0][chosen]
    return rows if groups is None else rows[:, groups.columns.of]


def _least(tables: FloatArray, added: FloatArray, groups: Groups | None) -> FloatArray:
    """The least over the rows of each table, [edge, column], after adding to its rows."""
    if groups is not None:
        added = np.minimum.reduceat(added[:, groups.rows.order], groups.rows.starts, axis=1)
    step = max(1, CHUNK // (tables.shape[1] * tables.shape[2]))
    if step >= len(added):
        least: FloatArray = np.minimum.reduce(tables + added[:, :, None], axis=1)
    else:
        parts = []
        for start in range(0, len(added), step):
            part = tables[start : start + step] if len(tables) > 1 else tables
            parts.append(np.minimum.reduce(part + added[start : start + step, :, None], axis=1))
        least = np.concatenate(parts)
    return least if groups is None else least[:, groups.columns.of]


def _least_of_rows(tables: FloatArray, removed: FloatArray, groups: Groups | None) -> FloatArray:
    """The least over the columns of each table, [edge, row], after subtracting from its columns."""
    if groups is not None:
        removed = np.maximum.reduceat(removed[:, groups.columns.order], groups.columns.starts, axis=1)
    step = max(1, CHUNK // (tables.shape[1] * tables.shape[2]))
    parts = []
    for start in range(0, len(removed), step):
        part = tables[start : start + step] if len(tables) > 1 else tables
        parts.append((part - removed[start : start + step, None, :]).min(axis=2))
    least = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return least if groups is None else least[:, groups.rows.of]
