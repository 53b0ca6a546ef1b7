"""The least cost that fits the memory, exactly, for few rows: all choices that may still become the best, extended node by node.

Nodes get their states in the reverse of an order of elimination. The tables of an elimination tell the least that a choice for some
nodes can still come to: its cost, its usage of every row, and its cost with the usage at prices. A choice is given up as soon as
one of these is too high. It is also given up if another choice, with the same states where the nodes ahead depend on them, is no worse
in cost and in every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.search.solver.limited.capacity import without_costs
from spmdctx.search.solver.limited.lagrange import priced
from spmdctx.search.solver.limited.selection import Amounts
from spmdctx.search.solver.problem.allowance import CALL
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.memory import Rows
from spmdctx.search.solver.unlimited.eliminate import Elimination, Factors, Memo, Order, elimination, order

MAX_ROWS = 16
MAX_CHOICES = 300_000
MAX_TABLE = 1 << 23
MAX_WORK = 600_000_000
"""Additions of all eliminations together: one for the cost, one for each row's usage, and one for both."""

_AT_ONCE = 4_000_000
"""The most entries of one array."""

_RIVALS = 24
"""The number of cheapest choices with which others that are the same for the nodes ahead are compared."""

_SORTING = 30
"""Additions that take as long as sorting one entry."""

_ONE_ROW = 3
"""Number of measures if the memory has one row."""

_ROUNDING = 1e-12


class CheapestFitting(NamedTuple):
    """Present states of the cheapest choice that fits and costs less than the known one; None if there is none."""

    states: list[int] | None


def cheapest_fitting(
    graph: CostGraph, amounts: Amounts, prices: FloatArray, most: float, expired: Callable[[], bool]
) -> CheapestFitting | None:
    """Returns the cheapest choice that fits, if it costs less than `most`; None if that is too much work.

    Args:
        graph: The costs; all nodes of several states that have a row must be left.
        amounts: The usage of its states.
        prices: Of each row's usage.
        most: The cost below which a choice is wanted.
        expired: Asked now and then.
    """
    found, num_rows = order_for(graph, amounts.rows), len(amounts.rows.times)
    if found is None:
        return None
    bare = without_costs(graph)
    # The first measure is the cost, then comes each row's usage, and last the cost with usage at prices.
    graphs = [graph, *(priced(bare, amounts, unit) for unit in np.eye(num_rows)), priced(graph, amounts, prices)]
    memo: Memo = {}
    parts = [elimination(own, found.nodes, memo, expired) for own in graphs]
    if any(part is None for part in parts):
        return None
    lowest = np.array([part.cost + own.base for part, own in zip(parts, graphs, strict=True) if part is not None])
    paid = float(prices.sum()) * amounts.rows.limit
    spare = _ROUNDING * (abs(most) + paid) if np.isfinite(most) else 0.0
    limits = np.array([most - spare, *[amounts.rows.most * (1 + _ROUNDING)] * num_rows, most + paid + spare])
    search = _PartialChoices(graph, [part for part in parts if part is not None], lowest, limits)
    return search.best(amounts, expired)


def order_for(graph: CostGraph, rows: Rows) -> Order | None:
    """Returns an order of elimination with small tables; None if there is none, or there are many rows."""
    num_rows = len(rows.times)
    return order(graph, MAX_TABLE, MAX_WORK // (num_rows + 2)) if num_rows <= MAX_ROWS else None


class _Extension(NamedTuple):
    """A node that got its states: for each choice, the earlier choice that it continues and the node's state."""

    node: int
    before: IntArray
    states: IntArray


class _PartialChoices:
    """Choices for the nodes so far. `least[k, i]` is the least that choice i can come to in measure k, limited by `limits[k]`."""

    def __init__(self, graph: CostGraph, parts: list[Elimination], lowest: FloatArray, limits: FloatArray) -> None:
        self._graph, self._parts, self._limits = graph, parts, limits
        self._least = lowest[:, None]
        self._states: dict[int, IntArray] = {}
        self._steps: list[_Extension] = []

    def best(self, amounts: Amounts, expired: Callable[[], bool]) -> CheapestFitting | None:
        """Returns the cheapest choice for all nodes."""
        if (self._least[:, 0] > self._limits).any():
            return CheapestFitting(None)
        places = _depth_first(self._parts[0])
        for place, ahead in zip(places, self._nodes_ahead(places), strict=True):
            if expired() or not self._extend(place, ahead):
                return None
            if not self._least.size:
                return CheapestFitting(None)
        for index in np.argsort(self._least[0], kind="stable").tolist():
            states = self._traced(index)
            if amounts.rows.excess(amounts.usage(states)) <= 0:
                return CheapestFitting(states)
        return CheapestFitting(None)

    def _nodes_ahead(self, places: list[int]) -> list[set[int]]:
        """Lists for each step the nodes in the tables of those that come after it."""
        found: list[set[int]] = []
        seen: set[int] = set()
        for place in reversed(places):
            found.append(set(seen))
            seen.update(node for part in self._parts for scope in part.steps[place][1] for node in scope)
        return found[::-1]

    def _extend(self, place: int, ahead: set[int]) -> bool:
        """Gives the node of an elimination step its states; returns False if there are too many choices."""
        node = self._parts[0].steps[place][0]
        size, count = self._graph.size(node), self._least.shape[1]
        at_once = max(1, _AT_ONCE // (size * len(self._parts)))
        pieces: list[tuple[IntArray, IntArray, FloatArray]] = []
        for start in range(0, count, at_once):
            self._graph.pool.allowance.charge(len(self._parts) * (CALL + min(at_once, count - start) * size))
            befores, states, least = self._continued(place, node, np.arange(start, min(start + at_once, count)))
            pieces.append((befores, states, least))
            if self._graph.pool.allowance.is_spent() or sum(len(piece[0]) for piece in pieces) > 4 * MAX_CHOICES:
                return False
        before = np.concatenate([piece[0] for piece in pieces])
        state = np.concatenate([piece[1] for piece in pieces])
        least = np.concatenate([piece[2] for piece in pieces], axis=1)
        columns = {other: own[before] for other, own in self._states.items() if other in ahead}
        if node in ahead:
            columns[node] = state
        kept = self._undominated(columns, least)
        self._least = least[:, kept]
        self._states = {other: own[kept] for other, own in columns.items()}
        self._steps.append(_Extension(node, before[kept], state[kept]))
        return len(kept) <= MAX_CHOICES

    def _continued(self, place: int, node: int, chosen: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """Extends the choices `chosen` by every state of a node that keeps them within the limits.

        Returns the earlier choices, the states, and the measures.
        """
        own = {other: states[chosen] for other, states in self._states.items()}
        rises = [self._rise(part.steps[place][1], node, own) for part in self._parts]
        shape = (len(chosen), self._graph.size(node))
        fits: BoolArray = np.ones(shape, dtype=bool)
        for least, rise, limit in zip(self._least[:, chosen], rises, self._limits, strict=True):
            fits &= least[:, None] + rise <= limit
        befores, states = np.nonzero(fits)
        least = np.stack(
            [low[chosen][befores] + np.broadcast_to(rise, shape)[befores, states] for low, rise in zip(self._least, rises, strict=True)]
        )
        return chosen[befores], states, least

    def _rise(self, around: Factors, node: int, states: dict[int, IntArray]) -> FloatArray:
        """Returns by how much each state of a node raises the least of each choice, as [choice or 1, state]."""
        total: FloatArray = np.zeros((1, self._graph.size(node)))
        for scope, number in around.items():
            table = np.moveaxis(self._graph.pool.arrays[number], scope.index(node), -1)
            total = total + table[tuple(states[other] for other in scope if other != node)].reshape(-1, total.shape[1])
        with np.errstate(invalid="ignore"):
            rise = total - total.min(axis=1, keepdims=True)
        return np.where(np.isfinite(total), rise, np.inf)

    def _undominated(self, columns: dict[int, IntArray], least: FloatArray) -> IntArray:
        """Returns the choices without those that another choice is found to dominate.

        A dominating choice is no worse in cost and in every row, and the same for the nodes ahead.
        """
        count = least.shape[1]
        self._graph.pool.allowance.charge(len(columns) * (CALL + _SORTING * count))
        key = np.zeros(count, dtype=np.int64)
        for node in sorted(columns):
            key = np.unique(key * self._graph.size(node) + columns[node], return_inverse=True)[1].reshape(-1)
        kept = np.lexsort((*least[-2:0:-1], least[0], key))
        if len(least) == _ONE_ROW:
            return kept[_is_lower(key[kept], least[1, kept])]
        for rival in range(_RIVALS):
            firsts = np.flatnonzero(np.diff(key[kept], prepend=-1))
            lengths = np.diff(firsts, append=len(kept))
            rank = np.arange(len(kept)) - np.repeat(firsts, lengths)
            if rank.max(initial=0) <= rival:
                break
            self._graph.pool.allowance.charge(CALL + 2 * len(least) * len(kept))
            other = np.repeat(np.minimum(firsts + rival, firsts + lengths - 1), lengths)
            measures = least[:-1, kept]
            worse = (rank > rival) & (measures[:, other] <= measures).all(axis=0)
            kept = kept[~worse]
        return kept

    def _traced(self, index: int) -> list[int]:
        """Returns the states of a choice for all nodes."""
        states = [0] * len(self._graph.unary)
        for node, before, own in reversed(self._steps):
            states[node], index = int(own[index]), int(before[index])
        return states


def _depth_first(part: Elimination) -> list[int]:
    """Orders the steps of an elimination so that each comes after those of the nodes in its tables.

    Connected steps come together, and small parts first, so that few nodes matter for those ahead at any time.
    """
    place_of = {node: place for place, (node, _) in enumerate(part.steps)}
    below: list[list[int]] = [[] for _ in part.steps]
    sizes, roots = [1] * len(part.steps), []
    for place, (node, around) in enumerate(part.steps):
        above = min((place_of[other] for scope in around for other in scope if other != node), default=-1)
        if above < 0:
            roots.append(place)
        else:
            below[above].append(place)
            sizes[above] += sizes[place]
    found, left = [], sorted(roots, key=sizes.__getitem__, reverse=True)
    while left:
        place = left.pop()
        found.append(place)
        left += sorted(below[place], key=sizes.__getitem__, reverse=True)
    return found


def _is_lower(key: IntArray, used: FloatArray) -> BoolArray:
    """Finds the entries that are lower than all before them with the same key; keys ascend."""
    rank = np.unique(used, return_inverse=True)[1].reshape(-1)
    # The values of a key are all below those of the keys before it.
    lowered = rank - key * (len(used) + 1)
    before = np.minimum.accumulate(lowered)
    found: BoolArray = np.ones(len(used), dtype=bool)
    found[1:] = lowered[1:] < before[:-1]
    return found
