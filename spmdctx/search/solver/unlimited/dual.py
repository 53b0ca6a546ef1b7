"""A lower bound by sequential reparametrisation (Kolmogorov's TRW-S, 2006), many edges at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.groups import Groups
from spmdctx.search.solver.unlimited.batches import BATCH_WORK, Batch, Link, Places, Single, batches_of, narrowed

CHUNK = 1 << 20
MAX_NUMBERED = 1000
"""The most nodes that send in the order of their numbers, which takes the fewest sweeps."""
MOMENTUM, DELAY = 0.9, 3
"""The most of its last change that a message goes on to change, and a number of sweeps: the more, the slower messages get there."""
CHECKED, SAME, LESS = 8, 1e-9, 0.7
"""Sweeps after which the bound is looked at, the share by which it may fall, and the share of momentum that a step back leaves."""
CALM = 3
"""Sweeps without momentum before others see the messages: from these, states are chosen better."""
PART_SWEEPS, MUCH_WORK = 20, 4e6
"""Sweeps after which a look at the bound is worth it, and the additions of one sweep from which it is."""
SOME_WORK = 2e5
"""The additions of one sweep from which momentum is worth it at prices of memory."""


class Bound(NamedTuple):
    """A lower bound on the cost of every choice, and for every node and state a lower bound on the choices with that state."""

    value: float
    beliefs: dict[int, FloatArray]


class Dual:
    """Messages on the edges of a graph. Any messages give a valid bound; `sweep` improves it.

    Each state's own cost must be finite, and every state must have a finite entry with each neighbour.

    Messages that `gain_momentum` go on in the direction in which they changed (Nesterov, 1983), which takes a quarter of the sweeps. Where
    the bound falls, they return to where it was highest, and start anew with less momentum. It `is_slow` if a sweep takes so long that
    looks at the bound and momentum are worth it from the start. It `is_long` if momentum is worth it at prices of memory.
    """

    def __init__(self, graph: CostGraph, before: Dual | None = None, kept: Mapping[int, IntArray] | None = None) -> None:
        """Starts from empty messages.

        If the graph is that of `before` with only the states `kept`, it starts from the messages of `before`.
        """
        self._graph = graph
        self._momentum: float | None = None
        self._sweeps, self._earlier = 0, np.zeros(0)
        self._highest: tuple[FloatArray, float] | None = None
        self.nodes = _ordered(graph)
        self._rank = rank = {node: rank for rank, node in enumerate(self.nodes)}
        self._edges = [(node, other) for node in self.nodes for other in sorted(graph.links[node]) if rank[node] < rank[other]]
        self._places = places = _places(graph, self.nodes, self._edges)
        self._costs: FloatArray = np.concatenate([graph.costs(node) for node in self.nodes]) if self.nodes else np.zeros(0)
        # The last message belongs to the tables that are filled up.
        self._messages: FloatArray = np.zeros(places.num_messages + 1)
        self._owner: IntArray = np.full(len(self._messages), places.num_states)
        for (_, receiver), at in places.messages.items():
            size, first = graph.size(receiver), places.states[receiver]
            self._owner[at : at + size] = np.arange(first, first + size)
        turned = [(other, node) for node, other in self._edges]
        sending: tuple[tuple[list[Link], bool], ...] = ((self._edges, True), (turned, False))
        entries = sum(math.prod(graph.table(*edge).shape) for edge in self._edges)
        self.is_slow = parts = entries > MUCH_WORK
        self.is_long = entries > SOME_WORK
        self._forward, self._backward = (
            [narrowed(batch) for batch in batches_of(graph, links, self._levels(ahead), places, self._shared, parts=parts)]
            for links, ahead in sending
        )
        self._sizes = [graph.size(node) for node in self.nodes]
        # Both directions send over as many entries.
        self._work = len(self._forward) * BATCH_WORK + entries
        self._all = batches_of(graph, self._edges, dict.fromkeys(self.nodes, 0), places, self._shared, fills=False, parts=parts)
        behind = [sum(rank[other] < rank[node] for other in graph.links[node]) for node in self.nodes]
        shares = np.array([self._shared(node) for node in self.nodes])
        self._share = np.repeat(shares, self._sizes)
        self._own = np.repeat(1.0 - shares * np.array(behind), self._sizes)
        self._firsts = np.array([places.states[node] for node in self.nodes], dtype=np.int64)
        if before is not None and kept is not None:
            self._inherit(before, kept)

    def _inherit(self, before: Dual, kept: Mapping[int, IntArray]) -> None:
        for edge, at in self._places.messages.items():
            start = before._places.messages.get(edge)
            states = kept[edge[1]]
            if start is not None and len(states) == self._graph.size(edge[1]):
                self._messages[at : at + len(states)] = before._messages[start + states]

    def resume(self, resumed: Resumed) -> None:
        """Starts from the messages of another dual."""
        before, places = resumed
        known: dict[int, IntArray] = {}
        for edge, at in self._places.messages.items():
            start, node = before._places.messages.get(edge), edge[1]
            if start is None:
                continue
            if node not in known:
                origin, own = before._graph.origin[node], places[node][self._graph.origin[node]]
                found = np.minimum(np.searchsorted(origin, own), len(origin) - 1)
                known[node] = np.where(origin[found] == own, found, -1)
            at_node = known[node]
            sent = self._messages[at : at + len(at_node)]
            sent[:] = np.where(at_node >= 0, before._messages[start + at_node], sent)

    def _levels(self, forward: bool) -> dict[int, int]:
        """Returns the level of each node: nodes of one level send after all lower levels, and not to each other."""
        level = dict.fromkeys(self.nodes, 0)
        for node in self.nodes if forward else reversed(self.nodes):
            for other in self._graph.links[node]:
                if (self._rank[node] < self._rank[other]) == forward:
                    level[other] = max(level[other], level[node] + 1)
        return level

    def _shared(self, node: int) -> float:
        """Returns the part of a node's costs that each chain through the node gets."""
        ahead = sum(self._rank[other] > self._rank[node] for other in self._graph.links[node])
        return 1.0 / max(ahead, len(self._graph.links[node]) - ahead, 1)

    def message(self, sender: int, receiver: int) -> FloatArray:
        """Returns the message of a node to a neighbour: one number for each state of the neighbour."""
        at = self._places.messages[sender, receiver]
        return self._messages[at : at + self._graph.size(receiver)]

    def add(self, node: int, costs: FloatArray) -> None:
        """Adds to the costs of a node's states."""
        start = self._places.states[node]
        self._costs[start : start + len(costs)] += costs

    def _totals(self) -> FloatArray:
        """Returns the costs of the states with all messages that they receive; the last entry belongs to no state."""
        totals = np.append(self._costs, 0.0)
        totals += np.bincount(self._owner, self._messages, len(totals))
        return totals

    def sweep(self, num_sweeps: int, expired: Callable[[], bool]) -> None:
        """Sends messages along all edges forward and backward, `num_sweeps` times; the bound does not fall."""
        for left in range(num_sweeps, 0, -1):
            if self._momentum is not None:
                self._go_on(is_calm=left <= CALM)
            for batches in (self._forward, self._backward):
                if expired():
                    return
                self._graph.pool.allowance.charge(self._work)
                if self._momentum is None or batches is self._forward:
                    totals = self._totals()
                for batch in batches:
                    if isinstance(batch, Single):
                        self._send_one(batch, totals)
                    else:
                        self._send(batch, totals)

    def gain_momentum(self) -> None:
        """Lets messages go on as they changed, from now on."""
        if self._momentum is None:
            self._momentum = MOMENTUM

    def parts(self, num_sweeps: int) -> tuple[int, ...]:
        """Divides sweeps by the times at which a look at the bound is worth it."""
        every = PART_SWEEPS if self.is_slow else num_sweeps
        return tuple([min(every, num_sweeps - done) for done in range(0, num_sweeps, every)])

    def _go_on(self, *, is_calm: bool) -> None:
        """Changes the messages before a sweep as the last ones did, more so with every sweep."""
        if self._sweeps and self._sweeps % CHECKED == 0:
            self._turns_back(self.value())
        present = self._messages.copy()
        if self._sweeps and self._momentum is not None and not is_calm:
            self._messages += min(self._momentum, self._sweeps / (self._sweeps + DELAY)) * (present - self._earlier)
        self._earlier = present
        self._sweeps += 1

    def _turns_back(self, value: float) -> bool:
        """Returns to the messages of the highest bound if that of the present ones, whose value is given, is lower."""
        if self._momentum is None:
            return False
        if self._highest is None or value >= self._highest[1] - SAME * abs(value):
            self._highest = self._messages.copy(), value
            return False
        self._messages, self._sweeps = self._highest[0].copy(), 0
        self._momentum *= LESS
        return True

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
        messages = self._messages
        known = totals.take(batch.left)
        known *= batch.share
        known -= messages.take(batch.into_left)
        sent = _least(batch.tables, known, batch.groups)
        # Only differences matter; subtracting the least keeps the numbers small.
        sent -= np.minimum.reduce(sent, axis=0)
        change = sent - messages.take(batch.into_right)
        if batch.is_apart:
            totals[batch.right] += change
        else:
            np.add.at(totals, batch.right.ravel(), change.ravel())
        messages[batch.into_right] = sent

    def untied(self, most: float, parts: Sequence[int], expired: Callable[[], bool], is_enough: Callable[[list[int]], bool]) -> None:
        """Chooses states after each part of sweeps with up to `most` more for each state, at random; leaves the messages as they are.

        Where several choices cost the same, each node may choose a part of another one. This makes one of them the best.
        """
        kept, before = self.kept(), (self._momentum, self._sweeps, self._earlier, self._highest)
        self._costs = self._costs + most * np.random.default_rng(0).random(len(self._costs))
        self._momentum, self._sweeps, self._highest = MOMENTUM, 0, None
        try:
            for part in parts:
                self.sweep(part, expired)
                if is_enough(self.decode()):
                    break
        finally:
            self._messages, self._costs = kept
            self._momentum, self._sweeps, self._earlier, self._highest = before

    def kept(self) -> tuple[FloatArray, FloatArray]:
        """Returns a copy of the present messages and costs, of which `bound` can be asked later."""
        return self._messages.copy(), self._costs.copy()

    def value(self) -> float:
        """Returns the value of the bound of the present messages, in half of the time."""
        if not self.nodes:
            return 0.0
        self._graph.pool.allowance.charge(2 * self._work)
        totals = self._totals()[:-1]
        value = float(np.minimum.reduceat(totals * self._own, self._firsts).sum()) - self._rounding(totals)
        shared = totals * self._share
        for batch in self._all:
            value += float(np.add.reduce(np.minimum.reduce(self._left_on_rows(batch, shared), axis=0)))
        return value

    def _left_on_rows(self, batch: Batch, shared: FloatArray) -> FloatArray:
        """Returns the least that is left of each row of a batch's tables, [row, edge]."""
        rows = _least_of_rows(batch.tables, self._messages[batch.into_right] - shared[batch.right], batch.groups)
        rows -= self._messages[batch.into_left]
        return rows

    def bound_of(self, kept: tuple[FloatArray, FloatArray]) -> Bound:
        """Returns the bound of messages and costs that were `kept`."""
        present = self._messages, self._costs
        self._messages, self._costs = kept
        found = self._bound()
        self._messages, self._costs = present
        return found

    def bound(self) -> Bound:
        """Returns the bound of the present messages; of those of the highest bound, if messages have momentum."""
        self._graph.pool.allowance.charge(2 * self._work if self.nodes else 0)
        found = self._bound()
        return self._bound() if self._turns_back(found.value) else found

    def _bound(self) -> Bound:
        if not self.nodes:
            return Bound(0.0, {})
        totals = self._totals()[:-1]
        # After a backward pass a node's costs belong in equal shares to its edges to the nodes before.
        beliefs, shared = totals * self._own, totals * self._share
        lowest = np.minimum.reduceat(beliefs, self._firsts)
        value = float(lowest.sum()) - self._rounding(totals)
        beliefs -= np.repeat(lowest, np.diff(self._firsts, append=len(totals)))
        for batch in self._all:
            into_left = self._messages[batch.into_left]
            into_right = self._messages[batch.into_right] - shared[batch.right]
            rows = _least_of_rows(batch.tables, into_right, batch.groups)
            rows -= into_left
            columns = _least(batch.tables, -into_left, batch.groups)
            columns -= into_right
            least = np.minimum.reduce(rows, axis=0)
            value += float(np.add.reduce(least))
            np.add.at(beliefs, batch.left.ravel(), (rows - least).ravel())
            np.add.at(beliefs, batch.right.ravel(), (columns - least).ravel())
        beliefs += value
        starts = self._places.states
        return Bound(value, {node: beliefs[start : start + self._graph.size(node)] for node, start in starts.items()})

    def _rounding(self, totals: FloatArray) -> float:
        """Returns more than the error of the bound's additions."""
        sizes = np.abs(np.minimum.reduceat(totals, self._firsts)).sum() + np.maximum.reduceat(totals, self._firsts).sum()
        return float(8 * np.finfo(np.float64).eps * (sizes + np.abs(self._messages[:-1]).sum()))

    def decode(self) -> list[int]:
        """Chooses states one node after the other, by the costs to the nodes before and the messages of the nodes after."""
        totals = self._totals()
        for batch in self._forward:
            if isinstance(batch, Single):
                known = _rows(batch.table[:, :, None], np.array([totals[batch.left].argmin()]), batch.groups)[:, 0]
                totals[batch.right] += known - self._messages[batch.into_right]
                continue
            chosen = totals[batch.left].argmin(axis=0)
            known = _rows(batch.tables, chosen, batch.groups)
            np.add.at(totals, batch.right.ravel(), (known - self._messages[batch.into_right]).ravel())
        states = [0] * len(self._graph.unary)
        for start, size, node in zip(self._firsts.tolist(), self._sizes, self.nodes, strict=True):
            states[node] = int(totals[start : start + size].argmin())
        return states


class Resumed(NamedTuple):
    """The dual of another graph with the same nodes, from whose messages one starts.

    `places` has for each node the original state of the other graph that each original state of this one resembles, -1 for none.
    """

    dual: Dual
    places: Sequence[IntArray]


def _places(graph: CostGraph, nodes: Sequence[int], edges: Sequence[Link]) -> Places:
    """Places the states one node after the other, and the messages edge by edge: first the one ahead, then the one back."""
    states: dict[int, int] = {}
    num_states = 0
    for node in nodes:
        states[node] = num_states
        num_states += graph.size(node)
    messages: dict[Link, int] = {}
    num_messages = 0
    for node, other in edges:
        for sender, receiver in ((node, other), (other, node)):
            messages[sender, receiver] = num_messages
            num_messages += graph.size(receiver)
    return Places(states, messages, num_states, num_messages)


def _ordered(graph: CostGraph) -> list[int]:
    """Returns the order in which nodes send: by number, or for many nodes by colour, so that most can send at once."""
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
    """Returns one row of each table, [column, edge]."""
    if groups is not None:
        chosen = groups.rows.of[chosen]
    edges = np.arange(len(chosen)) if tables.shape[2] > 1 else 0
    rows: FloatArray = tables[chosen, :, edges].T
    return rows if groups is None else rows[groups.columns.of]


def _least(tables: FloatArray, added: FloatArray, groups: Groups | None) -> FloatArray:
    """Returns the minimum over the rows of each table, [column, edge], after adding to its rows."""
    if groups is not None:
        added = np.minimum.reduceat(added.take(groups.rows.order, axis=0), groups.rows.starts, axis=0)
    step = max(1, CHUNK // (tables.shape[0] * added.shape[1]))
    if step >= tables.shape[1]:
        least: FloatArray = np.minimum.reduce(tables + added[:, None, :], axis=0)
    else:
        every = range(0, tables.shape[1], step)
        least = np.concatenate([np.minimum.reduce(tables[:, start : start + step] + added[:, None, :], axis=0) for start in every])
    return least if groups is None else least.take(groups.columns.of, axis=0)


def _least_of_rows(tables: FloatArray, removed: FloatArray, groups: Groups | None) -> FloatArray:
    """Returns the minimum over the columns of each table, [row, edge], after subtracting from its columns."""
    if groups is not None:
        removed = np.maximum.reduceat(removed.take(groups.columns.order, axis=0), groups.columns.starts, axis=0)
    step = max(1, CHUNK // (tables.shape[1] * removed.shape[1]))
    if step >= tables.shape[0]:
        least: FloatArray = np.minimum.reduce(tables - removed, axis=1)
    else:
        every = range(0, tables.shape[0], step)
        least = np.concatenate([np.minimum.reduce(tables[start : start + step] - removed, axis=1) for start in every])
    return least if groups is None else least.take(groups.rows.of, axis=0)
