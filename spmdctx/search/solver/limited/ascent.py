"""The joint ascent of memory prices and edge messages, for graphs on which every exact minimum would take too long."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.limited.selection import Amounts
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.reproducible import dot, length, power
from spmdctx.search.solver.unlimited.dual import Bound, Dual
from spmdctx.search.solver.unlimited.run import SolverRun

SHARPENINGS = 4
"""Number of times that the shape of the first prices is squared."""
START_SWEEPS = 10
FIRST_STEP = 0.2
LAST_STEP = 1e-4
SWEEPS = 2
SHOWN = 10
NEAR = 1.1
"""Decoded states are worth a repair if they use at most this share of the limit."""
MEMORY_OF_DIRECTION = 0.7


class Ascent:
    """Raises the bound of a graph with memory: one sweep of messages, then a step of the prices along the excess of the decoded states.

    `prices` are those of the last step. All bounds are without the graph's constant.
    It stops when `share` of the time is over.
    """

    def __init__(self, graph: CostGraph, amounts: Amounts, search: SolverRun, share: float = 1.0) -> None:
        self.graph = graph
        self.amounts = amounts
        self.search = search
        self.share = share
        self.dual = Dual(graph)
        self.prices: FloatArray = np.zeros(len(amounts.rows.times))
        self._weights: FloatArray = np.zeros(len(amounts.of))
        self.bound = -np.inf
        self._kept: tuple[FloatArray, FloatArray] | None = None
        self._fixed = amounts.chosen([0] * len(amounts.of))
        self._fixed[[node for node in amounts.live if graph.alive[node]]] = 0.0

    def set_prices(self, prices: FloatArray) -> None:
        """Charges other prices, and keeps the messages."""
        weights = self.amounts.rows.weights(prices)
        for node in self.dual.nodes:
            used, change = self.amounts.of[node], weights[node] - self._weights[node]
            if used is not None and change:
                self.dual.add(node, change * used)
        self.prices, self._weights = prices, weights

    def measure(self) -> float:
        """Returns the bound at the present prices and messages."""
        paid = float(self.prices.sum()) * self.amounts.rows.limit - dot(self._weights, self._fixed)
        value = self.dual.value() - paid - 1e-13 * abs(paid)
        if value > self.bound:
            self.bound, self._kept = value, self.dual.kept()
        return value

    @property
    def best(self) -> Bound | None:
        """The highest bound found, with its bounds by state, which few ask for."""
        if self._kept is None:
            return None
        found = self.dual.bound_of(self._kept)
        shift = self.bound - found.value
        return Bound(self.bound, {node: belief + shift for node, belief in found.beliefs.items()})

    def is_over(self) -> bool:
        """Returns whether its share of the time is over."""
        return self.search.progress() >= self.share

    def start(self) -> None:
        """Raises prices, highest where the least usage is, until the decoded states nearly fit."""
        rows = self.amounts.rows
        least = self.amounts.usage(self.amounts.least())
        shape = power(least / least.max(), SHARPENINGS) if least.max() > 0 else np.ones(len(least))
        costs = [self.graph.costs(node) for node in self.dual.nodes]
        spread = float(sum(cost.max() - cost.min() for cost in costs)) or 1.0
        scale = 1e-6 * spread / (rows.unit * float(shape.sum()))
        self.dual.sweep(START_SWEEPS, self.is_over)
        for _ in range(40):
            self.set_prices(scale * shape)
            self.dual.sweep(2, self.is_over)
            self.measure()
            if self.is_over() or self.amounts.usage(self.dual.decode()).max() <= NEAR * rows.limit:
                return
            scale *= 3.0

    def run(self, num_steps: int, offer: Callable[[list[int], bool], float]) -> None:
        """Takes steps of the prices along the excess, relative to their length.

        A step that fails is taken back, and the next is shorter. `offer` is shown the decoded states, with True if they are worth a repair,
        and returns the least cost known.
        """
        limit, unit = self.amounts.rows.limit, self.amounts.rows.unit
        step, best, direction = FIRST_STEP, self.prices, np.zeros(len(self.prices))
        for number in range(num_steps):
            self.dual.sweep(SWEEPS, self.is_over)
            before = self.bound
            self.measure()
            if self.bound > before:
                best, step = self.prices, min(1.3 * step, FIRST_STEP)
            else:
                step *= 0.8
            states = self.dual.decode()
            usage = self.amounts.usage(states)
            known = offer(states, number % SHOWN == 0 and usage.max() <= NEAR * limit)
            if step < LAST_STEP or known <= self.bound or self.is_over():
                return
            direction = MEMORY_OF_DIRECTION * direction + (1 - MEMORY_OF_DIRECTION) * np.clip((usage - limit) / unit, -0.1, 0.1)
            along = np.where((best <= 0) & (direction < 0), 0.0, direction)
            size = length(along)
            if size > 0:
                self.set_prices(np.maximum(best + step * length(best) / size * along, 0.0))
