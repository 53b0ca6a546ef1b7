"""The memory as rows: one for each time at which the set of live nodes is maximal and could exceed the limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.search.solver.problem.problem import Memory

ROUNDING = 1e-12
"""The share of the limit by which a usage may exceed it through rounding."""

_DIGITS = 12
"""Digits to which counts of lives are rounded."""


def usage_over_time(memory: Memory, used: Sequence[float]) -> FloatArray:
    """Returns the usage at each time where the nodes use so much while they live; at least one time."""
    lives = np.array([life[:3] for life in memory.lives], dtype=np.int64).reshape(-1, 3)
    sizes = np.asarray(used)[lives[:, 0]] * [life.share for life in memory.lives]
    change = np.zeros(lives[:, 2].max(initial=0) + 1)
    np.add.at(change, lives[:, 1], sizes)
    np.subtract.at(change, lives[:, 2], sizes)
    found: FloatArray = np.cumsum(change)
    return found


class Rows:
    """The memory constraints of a problem. The lives of a node are cut into pieces that do not overlap, each with a count.

    Attributes:
        times: A time of each row, ascending.
        nodes, firsts, lasts, counts: For each piece its node, its rows `firsts <= row < lasts`, and how often it counts, which is the
            sum of the shares of its lives.
        limit: The most usage per row.
        usages: Usage by node and original state.
        live: Whether a node has any row.
        priced: The usages of the live nodes, None for the others.
        ranges: The pieces (first, last, count) of each node.
    """

    def __init__(self, memory: Memory, possible: Sequence[IntArray]) -> None:
        """Makes the rows that some choice among the `possible` states of each node violates."""
        self.limit = float(memory.limit)
        self.usages = memory.usages
        kept = [life for life in memory.lives if life.start < life.end]
        lives = np.array([(node, start, end) for node, start, end, _ in kept], dtype=np.int64).reshape(-1, 3)
        shares = np.array([life.share for life in kept])
        self.nodes, starts, ends = np.ascontiguousarray(lives.T)
        self.times = _maximal(starts, ends)
        self.firsts, self.lasts = self._placed(starts, ends)
        most = np.array([memory.usages[node][states].max() if len(states) else 0.0 for node, states in enumerate(possible)])
        self.times = self.times[self._summed(most[self.nodes] * shares) > self.most]
        self.ranges = _merged(self.nodes, *self._placed(starts, ends), shares, len(possible))
        flat = [(node, first, last) for node, pieces in enumerate(self.ranges) for first, last, _ in pieces]
        self.nodes, self.firsts, self.lasts = np.ascontiguousarray(np.array(flat, dtype=np.int64).reshape(-1, 3).T)
        self.counts = np.array([count for pieces in self.ranges for _, _, count in pieces])
        self.live = [bool(pieces) for pieces in self.ranges]
        self.priced = tuple(usage if live else None for usage, live in zip(self.usages, self.live, strict=True))

    @property
    def unit(self) -> float:
        """The limit as a unit of usage; 1 if the limit is zero."""
        return self.limit if self.limit > 0 else 1.0

    @property
    def most(self) -> float:
        """The limit plus its rounding."""
        return self.limit + ROUNDING * abs(self.limit)

    def _placed(self, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        return np.searchsorted(self.times, starts), np.searchsorted(self.times, ends)

    def _summed(self, amounts: FloatArray) -> FloatArray:
        """Sums amounts per life into rows."""
        change = np.bincount(self.firsts, amounts, len(self.times) + 1) - np.bincount(self.lasts, amounts, len(self.times) + 1)
        summed: FloatArray = np.cumsum(change)[:-1]
        return summed

    def usage(self, amounts: FloatArray) -> FloatArray:
        """Returns the usage of each row, given the usage of each node."""
        return self._summed(amounts[self.nodes] * self.counts)

    def excess(self, usage: FloatArray) -> float:
        """Returns the excess of the rows' usage over the limit, at most 0 if it fits."""
        return float((usage - self.most).max(initial=-np.inf))

    def at_times(self, prices: FloatArray) -> tuple[tuple[int, float], ...]:
        """Returns the prices of rows that have one, each behind the row's time."""
        rows = np.flatnonzero(prices)
        return tuple(zip(self.times[rows].tolist(), prices[rows].tolist(), strict=True))

    def of_times(self, known: Sequence[tuple[int, float]]) -> FloatArray:
        """Returns prices per row for those of times, which another problem's rows may have; each goes to the last row up to its time."""
        prices = np.zeros(len(self.times))
        for time, price in known:
            prices[max(int(np.searchsorted(self.times, time, side="right")) - 1, 0)] += price
        return prices

    def weights(self, prices: FloatArray) -> FloatArray:
        """Returns the price of one unit of usage of each node, given prices per row."""
        summed = np.concatenate([[0.0], np.cumsum(prices)])
        weights = np.bincount(self.nodes, (summed[self.lasts] - summed[self.firsts]) * self.counts, len(self.live))
        return weights.astype(np.float64)


def _maximal(starts: IntArray, ends: IntArray) -> IntArray:
    """Returns the times at which a life starts and before the next start a life ends."""
    times = np.unique(starts)
    bounds = np.searchsorted(times, np.unique(ends) - 1, side="right") - 1
    # An end after time s and no later than the next start: s is the last start before that end.
    return times[np.unique(bounds)]


_Piece = tuple[int, int, float]


def _merged(nodes: IntArray, firsts: IntArray, lasts: IntArray, shares: FloatArray, num_nodes: int) -> list[list[_Piece]]:
    """Returns the pieces of each node, without the lives that have no row."""
    lives: list[list[_Piece]] = [[] for _ in range(num_nodes)]
    for node, first, last, share in zip(nodes.tolist(), firsts.tolist(), lasts.tolist(), shares.tolist(), strict=True):
        if first < last:
            lives[node].append((first, last, share))
    return [ranges if len(ranges) == 1 else _pieces(ranges) for ranges in lives]


def _pieces(ranges: list[_Piece]) -> list[_Piece]:
    """Cuts ranges wherever one starts or ends, and sums the shares of those that cover each piece."""
    change: dict[int, float] = {}
    for first, last, share in ranges:
        change[first] = change.get(first, 0.0) + share
        change[last] = change.get(last, 0.0) - share
    cuts = sorted(change)
    # Shares that were added and taken off again leave a trifle.
    counts = [round(count, _DIGITS) for count in accumulate(map(change.__getitem__, cuts))]
    return [(first, last, count) for (first, last), count in zip(pairwise(cuts), counts, strict=False) if count]
