"""The least cost that fits the memory: prices for the bound, flips and repair for the states, enumeration where it is small."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmdctx.search.solver.assignment import Amounts, Assignment
from spmdctx.search.solver.capacity import has_hard_tables, smallest
from spmdctx.search.solver.closing import Enumerated, enumerate_choices, states_at
from spmdctx.search.solver.energy import Minimum, Search
from spmdctx.search.solver.graph import Graph
from spmdctx.search.solver.lagrange import Prices
from spmdctx.search.solver.memory import Rows
from spmdctx.search.solver.problem import FloatArray, Infeasible

PRICE_STEPS = 30


class Constrained:
    """One problem whose memory may bind. States are present states of `graph`, which is reduced with regard to memory."""

    def __init__(self, graph: Graph, rows: Rows, search: Search) -> None:
        self.graph = graph
        self.rows = rows
        self.search = search
        self.amounts = Amounts(graph, rows)
        self.best: Minimum | None = None

    def run(self) -> Minimum | Infeasible:
        """The best choice that fits with its bound, or what cannot be met."""
        choices = enumerate_choices(self.graph, self.rows)
        if choices is not None:
            return self._enumerated(choices)
        least = self.amounts.usage(self.amounts.least())
        if self.rows.excess(least) > 0:
            return self._infeasible(least)
        prices = Prices(self.graph, self.amounts, self.search)
        free = prices.evaluate(np.zeros(len(self.rows.times)))
        if free is None:
            return self._infeasible(least)
        self._offer(free.states)
        self._offer_repaired(free.states)
        self._offer_repaired(self.amounts.least())
        if not self._is_proven(prices.bound):
            if self.best is not None:
                prices.add(self.best.states)
            self._search_prices(prices)
        if self.best is None:
            missing = self._infeasible(least)
            if self.best is None:
                return missing
        return self.best._replace(bound=min(self.best.cost, prices.bound))

    def _search_prices(self, prices: Prices) -> None:
        prices.run(PRICE_STEPS, max(self.search.tolerance, 1e-9))
        choices = sorted(prices.choices, key=lambda choice: choice.cost)
        for choice in choices[:12]:
            self._offer_repaired(choice.states)
        for choice in choices:
            if self.best is not None:
                found = self._assignment(self.best.states)
                found.flip(choice.states)
                found.improve(self.search.expired)
                self._offer(found.states)

    def _assignment(self, states: Sequence[int]) -> Assignment:
        return Assignment(self.graph, self.amounts, states)

    def _offer(self, states: Sequence[int]) -> None:
        found = self._assignment(states)
        if found.fits():
            value = found.cost()
            if np.isfinite(value) and (self.best is None or value < self.best.cost):
                self.best = Minimum(list(states), value, -np.inf)

    def _offer_repaired(self, states: Sequence[int]) -> None:
        found = self._assignment(states)
        if found.repair(self.search.expired):
            found.improve(self.search.expired)
            self._offer(found.states)

    def _is_proven(self, bound: float) -> bool:
        return self.best is not None and self.best.cost - bound <= max(self.search.tolerance, 1e-12) * abs(self.best.cost)

    def _enumerated(self, choices: Enumerated) -> Minimum | Infeasible:
        self.search.count("enumerated", len(choices.costs))
        finite = np.isfinite(choices.costs)
        usage = np.where(finite, choices.usage, np.inf)
        costs = np.where((usage <= self.rows.most).all(axis=0), choices.costs, np.inf)
        index = int(costs.argmin())
        if np.isfinite(costs[index]):
            return Minimum(states_at(choices, index, len(self.graph.unary)), float(costs[index]), float(costs[index]))
        return infeasible(self.rows, usage.min(axis=1), usage[:, int(usage.max(axis=0).argmin())])

    def _infeasible(self, least: FloatArray) -> Infeasible | Minimum:
        """What memory cannot be met; or after all a choice that fits, if looking for the smallest limit finds one."""
        if not has_hard_tables(self.graph):
            return infeasible(self.rows, least, least)
        found = smallest(self.graph, self.amounts, self.search)
        if found is None:
            return infeasible(self.rows, least, np.full(len(least), np.inf))
        self._offer_repaired(found[0])
        return infeasible(self.rows, least, found[1]) if self.best is None else self.best


def infeasible(rows: Rows, least: FloatArray, smallest: FloatArray) -> Infeasible:
    """What cannot be met: the row whose least usage is highest, or where every row can be met alone the highest of the smallest choice."""
    row = int(least.argmax())
    if least[row] <= rows.most:
        row, least = int(smallest.argmax()), smallest
    return Infeasible(int(rows.times[row]), float(least[row]), float(smallest.max()))
