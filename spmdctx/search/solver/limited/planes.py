"""Prices for the memory of a wide graph by exact minima: each starts from the messages of the one before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.search.solver.limited.lagrange import Candidate, Prices, priced
from spmdctx.search.solver.limited.selection import Amounts
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.problem import Known
from spmdctx.search.solver.unlimited.dual import Dual, Resumed
from spmdctx.search.solver.unlimited.energy import Minimisation
from spmdctx.search.solver.unlimited.run import SWEEPS, WORK, SolverRun

EFFORT = 1
"""Of each minimum."""
FINE = 0.05
"""Share of the search's tolerance to which minima are exact, so that most of it is left for the prices."""
LEAST_TOLERANCE = 1e-5
LOOSE = 0.002
"""The gap of a minimum, relative to its cost, from which on prices by messages are the better way."""
MOST_MISSED = 2
"""Such minima one after the other; the prices after the first are mostly better."""
WORTH = 0.02
"""Share of what a bound must rise by to be enough, by which other prices must be able to raise it."""
_HIGHEST = 30.0
"""Multiple of the range of all costs that half of the limit may cost at most."""


class WidePrices(Prices):
    """Cutting planes of a wide graph."""

    def __init__(self, graph: CostGraph, amounts: Amounts, search: SolverRun, bound: float, known: Known) -> None:
        """Starts from a bound, and from the choices and prices that are known."""
        tolerance = max(FINE * search.tolerance, LEAST_TOLERANCE)
        fine = replace(search, effort=EFFORT, work=WORK // 4, rounds=len(SWEEPS), tolerance=tolerance, keeps_states=True)
        super().__init__(graph, amounts, fine)
        self.bound, self._missed = bound, 0
        self._before: Dual | None = None
        self._places: list[IntArray] = [np.arange(int(origin[-1]) + 1 if len(origin) else 0) for origin in graph.origin]
        for states in known.choices:
            self.add(list(states))
        self._first = amounts.rows.of_times(known.prices)
        self.active += [row for row in np.flatnonzero(self._first).tolist() if row not in self.active]

    @property
    def is_loose(self) -> bool:
        """Returns whether the last minima could not be found in the effort's time, so that further ones are not worth it."""
        return self._missed >= MOST_MISSED

    @property
    def has_missed(self) -> bool:
        """Returns whether the last minimum could not be found in the effort's time."""
        return self._missed > 0

    def are_spent(self, most: float, enough: float, tolerance: float) -> bool:
        """Returns whether no other prices raise the bound, to `most` at most, by what is worth a minimum."""
        if not np.isfinite(most):
            return False
        left = enough - self.bound if np.isfinite(enough) else 0.0
        return most - self.bound <= max(tolerance / 4 * abs(most), 1e-9 * abs(most), WORTH * left)

    def evaluate_below(self, prices: FloatArray, enough: float) -> Candidate | None:
        """Returns the best choice at prices, which may raise the bound, or a good one if the bound is `enough`; None if there is none."""
        at_prices, paid = priced(self.graph, self.amounts, prices), float(prices.sum()) * self.amounts.rows.limit
        self.search.cutoff = self.search.enough = enough + paid
        # A choice that costs no more than the bound at these prices shows that they do not raise it.
        self.search.useless = self.bound + paid
        minimisation = Minimisation(at_prices, self.search, None if self._before is None else Resumed(self._before, self._places))
        found = minimisation.run()
        self._before = minimisation.dual or self._before
        if found is None:
            return None
        self.search.count("prices", 1)
        self.raise_bound(prices, found.bound)
        was_missed = self.bound < enough and found.cost > self.search.useless and found.cost - found.bound > LOOSE * abs(found.cost)
        self._missed = self._missed + 1 if was_missed else 0
        return self.add(found.states)

    def step(self) -> tuple[FloatArray, float]:
        """Returns the next prices to try, and the most that the bound can rise to."""
        if self._first.any():
            first, self._first = self._first, np.zeros(len(self._first))
            return first, np.inf
        limit, unit = self.amounts.rows.limit, self.amounts.rows.unit
        costs = np.array([choice.cost for choice in self.choices])
        slopes = np.array([(choice.usage[self.active] - limit) / unit for choice in self.choices])
        is_finite = np.isfinite(costs)
        if not is_finite.any():
            return np.zeros(len(self.amounts.rows.times)), np.inf
        found, most = highest(costs[is_finite], slopes[is_finite])
        prices = np.zeros(len(self.amounts.rows.times))
        prices[self.active] = found / unit
        return prices, most


def highest(costs: FloatArray, slopes: FloatArray) -> tuple[FloatArray, float]:
    """Returns the prices, none negative, at which the least of the planes `costs + slopes @ prices` is highest, and that height.

    It is a linear program. One more plane, which falls everywhere, keeps prices finite. The height is infinite if SciPy finds no answer.
    """
    spread = max(float(np.ptp(costs)), 1e-3 * float(np.abs(costs).max()), 1e-300)
    low, num_rows = float(costs.min()), slopes.shape[1]
    heights = np.append((costs - low) / spread, (costs.max() - low) / spread + _HIGHEST)
    from scipy.optimize import linprog  # as late as possible: it takes long to import

    falls = np.vstack([slopes, np.full((1, num_rows), -0.5)])
    rows = np.hstack([np.ones((len(heights), 1)), -falls])
    bounds = [(None, None), *[(0.0, None)] * num_rows]
    answer = linprog(np.array([-1.0, *[0.0] * num_rows]), A_ub=rows, b_ub=heights, bounds=bounds, method="highs")
    if answer.x is None:
        return np.zeros(num_rows), np.inf
    return np.maximum(answer.x[1:], 0.0) * spread, low + spread * float(answer.x[0])
