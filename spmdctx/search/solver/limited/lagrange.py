"""The prices for memory: the bound that they give, and the choices that are best at them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.limited.selection import Amounts
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.local import cost
from spmdctx.search.solver.unlimited.energy import minimise
from spmdctx.search.solver.unlimited.run import SolverRun

MAX_NEW_ROWS = 3


class Candidate(NamedTuple):
    """Present states of the graph, their cost and the usage of every row."""

    states: list[int]
    cost: float
    usage: FloatArray


def priced(graph: CostGraph, amounts: Amounts, prices: FloatArray) -> CostGraph:
    """Returns the graph with usage at prices per row added to the costs."""
    other = graph.copy()
    weights = amounts.rows.weights(prices)
    for node in amounts.live:
        used = amounts.of[node]
        if weights[node] > 0 and used is not None and graph.alive[node]:
            other.unary[node] = graph.pool.intern(graph.costs(node) + weights[node] * used)
        elif weights[node] > 0 and used is not None:
            other.base += float(weights[node] * used[0])
    return other


class Prices:
    """Kelley's cutting planes for the prices.

    Every choice found cuts the dual function from above; the next prices maximise the least of all cuts. Only rows whose limit a found
    choice exceeds have a price.
    """

    def __init__(self, graph: CostGraph, amounts: Amounts, search: SolverRun) -> None:
        self.graph = graph
        self.amounts = amounts
        self.search = search
        self.bound = -np.inf
        self.best = np.zeros(len(amounts.rows.times))
        self.choices: list[Candidate] = []
        self.active: list[int] = []

    def add(self, states: list[int]) -> Candidate:
        """Adds a choice as a cut; its worst rows become active."""
        choice = Candidate(states, cost(self.graph, states) + self.graph.base, self.amounts.usage(states))
        self.choices.append(choice)
        usage = choice.usage.copy()
        for _ in range(MAX_NEW_ROWS):
            row = int(usage.argmax())
            if usage[row] <= self.amounts.rows.most:
                break
            if row not in self.active:
                self.active.append(row)
            # Rows beside it, as far as usage stays above the limit, are no peaks of their own.
            usage[self._hill(usage, row)] = 0.0
        return choice

    def _hill(self, usage: FloatArray, row: int) -> slice:
        below = usage <= self.amounts.rows.most
        before, after = np.flatnonzero(below[:row]), np.flatnonzero(below[row:])
        return slice(int(before[-1]) if len(before) else 0, row + int(after[0]) if len(after) else len(usage))

    def evaluate(self, prices: FloatArray) -> Candidate | None:
        """Returns the best choice at prices, which may raise the bound; None if no choice was found in time."""
        found = minimise(priced(self.graph, self.amounts, prices), self.search, narrow=True)
        if found is None:
            return None
        self.search.count("prices", 1)
        self.raise_bound(prices, found.bound)
        return self.add(found.states)

    def raise_bound(self, prices: FloatArray, lowest: float) -> None:
        """Takes over prices at which every choice costs at least `lowest`, memory included, if they give a better bound."""
        paid = float(prices.sum()) * self.amounts.rows.limit
        # The choice may differ from the minimum by rounding, and so may the bound.
        bound = lowest - paid - 1e-13 * (abs(lowest) + paid)
        if bound > self.bound:
            self.bound, self.best = bound, prices

    def run(self, num_steps: int, worth: float) -> None:
        """Improves prices until the bound cannot rise by more than `worth`, relative to its size, or the steps are spent."""
        for _ in range(num_steps):
            prices, most = self._master()
            if most - self.bound <= worth * abs(most):
                return
            if self.search.expired() or self.evaluate(prices) is None:
                return

    def _master(self) -> tuple[FloatArray, float]:
        """Returns the prices that maximise the least of all cuts, and that least, which the bound cannot exceed."""
        limit, unit = self.amounts.rows.limit, self.amounts.rows.unit
        slopes = np.array([choice.usage[self.active] - limit for choice in self.choices]) / unit
        costs = np.array([choice.cost for choice in self.choices])
        low = float(costs.min())
        scale = max(float(costs.max()) - low, abs(low), 1e-300)
        upper = 1e4
        from scipy.optimize import linprog  # as late as possible: it takes long to import

        rows = np.hstack([np.ones((len(costs), 1)), -slopes])
        bounds = [(None, None), *[(0.0, upper)] * len(self.active)]
        answer = linprog(np.array([-1.0, *[0.0] * len(self.active)]), A_ub=rows, b_ub=(costs - low) / scale, bounds=bounds, method="highs")
        prices = np.zeros(len(self.amounts.rows.times))
        if answer.x is None:
            return prices, self.bound
        prices[self.active] = np.maximum(answer.x[1:], 0.0) * scale / unit
        return prices, low + scale * float(answer.x[0])
