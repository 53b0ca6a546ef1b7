"""The least cost that fits the memory.

Prices give the bound; flips and repair give the states; enumeration or an integer program closes small problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.limited.ascent import Ascent
from spmdctx.search.solver.limited.capacity import has_hard_tables, smallest
from spmdctx.search.solver.limited.closing import Enumerated, enumerate_choices, states_at
from spmdctx.search.solver.limited.forest import descend_forests
from spmdctx.search.solver.limited.frontier import cheapest_fitting, order_for
from spmdctx.search.solver.limited.lagrange import Prices, priced
from spmdctx.search.solver.limited.planes import WidePrices
from spmdctx.search.solver.limited.polish import Polish
from spmdctx.search.solver.limited.selection import Amounts, Selection
from spmdctx.search.solver.limited.size import ROOT_WORK, num_variables
from spmdctx.search.solver.problem.graph import CostGraph, is_whole
from spmdctx.search.solver.problem.memory import Rows
from spmdctx.search.solver.problem.problem import Infeasible, Known
from spmdctx.search.solver.unlimited.dual import Bound, Dual
from spmdctx.search.solver.unlimited.eliminate import order
from spmdctx.search.solver.unlimited.energy import EQUAL, MAX_TABLE, Minimum, is_narrow, minimise, shrink
from spmdctx.search.solver.unlimited.run import SolverRun

PRICE_STEPS = 30
QUICK_WORK = 20_000_000
"""Additions of one elimination at rising prices; beyond them, messages and states decoded from them do."""
QUICK_PRICES = 24
QUICK_SWEEPS = 3
QUICK_FITS = 6
"""Choices at rising prices, sweeps of messages before each, and choices that fit after which it ends."""
MAX_REPAIRS = 12
PLANES = 12
"""Minima of a wide problem at prices."""
NEAR_ENOUGH = 0.005
"""The gap to which they go on, even if a larger one is allowed: most of the work is that of the first."""
MAX_FREE = 3000
"""The most nodes of a wide problem that is first solved without memory."""
ASCENT_SHARE = 0.35
FOREST_PASSES = 6
PRUNING_SWEEPS = 15
SMALLER = 0.6
MAX_ROUNDS = 1_000_000
MAX_VARIABLES = 1000


def most_variables(effort: int) -> int:
    """Returns the most variables with which an integer program is tried."""
    return int(MAX_VARIABLES * 4**effort)


class Constrained:
    """One problem whose memory may bind. States are present states of `graph`, which was reduced with regard to memory."""

    def __init__(self, graph: CostGraph, rows: Rows, search: SolverRun, known: Known | None = None, cutoff: float = np.inf) -> None:
        self.known = known
        self.cutoff = cutoff
        self.graph = graph
        self.rows = rows
        self.search = search
        self.amounts = Amounts(graph, rows)
        self.best: Minimum | None = None
        self.bound = self.relaxed = -np.inf
        self.prices: FloatArray = np.zeros(len(rows.times))
        self.beliefs: Bound | None = None
        self.active: list[int] = []
        self.met: list[list[int]] = []
        self._is_whole = is_whole(graph)

    def run(self) -> Minimum | Infeasible:
        """Returns the best choice that fits with its bound, or the memory that cannot be met."""
        choices = enumerate_choices(self.graph, self.rows)
        if choices is not None:
            return self._enumerated(self.graph, choices)
        least = self.amounts.usage(self.amounts.least())
        if self.search.effort < 0:
            return self._repaired(least)
        if self.rows.excess(least) > 0:
            return self._infeasible(least)
        if is_narrow(self.graph):
            self._narrow()
        else:
            self._wide()
        if not self._is_proven():
            self._close()
        if not self._is_proven():
            self._polish()
        if self.best is None:
            self._offer_repaired(self.amounts.least())
        if self.best is None:
            missing = self._infeasible(least)
            if self.best is None:
                return missing._replace(is_proven=False, lower_bound=self.bound)
        return self.best._replace(bound=self.best.cost if self._gap() <= EQUAL else self.bound)

    def _repaired(self, least: FloatArray) -> Minimum | Infeasible:
        """Returns the best of few choices, changed node by node until they fit: the least work, and no bound."""
        known = () if self.known is None else self.known.choices
        choices = [*known, self.amounts.least(), *self._at_rising_prices()]
        for states in choices:
            self._offer_repaired(states)
        self._offer_flipped(choices)
        if self.best is not None:
            return self.best._replace(bound=-np.inf if self.known is None else min(self.known.lower_bound, self.best.cost))
        return infeasible(self.rows, least, np.full(len(least), np.inf))._replace(is_proven=False, lower_bound=0.0)

    def _at_rising_prices(self) -> Iterator[list[int]]:
        """Yields choices at prices that rise where memory lacks, until some choices fit."""
        rows, graph = self.rows, self.graph
        costs = [graph.costs(node) for node in graph.nodes()]
        spread = float(sum(np.ptp(cost[np.isfinite(cost)]) for cost in costs)) or 1.0
        lacking: FloatArray = np.zeros(len(rows.times))
        prices, scale, fitting, fitted = lacking, 1e-3, np.inf, 0
        is_cheap = order(graph, MAX_TABLE, QUICK_WORK) is not None
        dual = None if is_cheap else Ascent(graph, self.amounts, self.search)
        for _ in range(QUICK_PRICES):
            if self.search.expired():
                return
            if dual is None:
                found = minimise(priced(graph, self.amounts, prices), self.search)
                if found is None:
                    return
                states = found.states
            else:
                dual.set_prices(prices)
                dual.dual.sweep(QUICK_SWEEPS, self.search.expired)
                states = dual.dual.decode()
            yield states
            usage = self.amounts.usage(states)
            if rows.excess(usage) > 0:
                over = np.maximum(usage - rows.limit, 0.0)
                lacking = 0.5 * lacking + over / float(over.sum())
                scale = min(3.0 * scale, float(np.sqrt(scale * fitting)))
            else:
                fitted, fitting = fitted + 1, scale
                scale /= 2.0
            if fitted == QUICK_FITS or scale > 0.9 * fitting:
                return
            prices = scale * spread / rows.unit * lacking

    def _raise(self, bound: float, *, is_relaxed: bool = False) -> None:
        """Takes over a bound if it is higher, rounded up if all costs are whole; one that `is_relaxed` holds for mixed states too."""
        self.relaxed = max(self.relaxed, bound) if is_relaxed else self.relaxed
        if self._is_whole and np.isfinite(bound):
            bound = float(np.ceil(bound - EQUAL * abs(bound)))
        self.bound = max(self.bound, bound)

    def _narrow(self) -> None:
        """Solves a narrow graph, whose minima are exact and cheap.

        Cutting planes give prices; flips combine the choices that they meet.
        """
        prices = Prices(self.graph, self.amounts, self.search)
        free = prices.evaluate(np.zeros(len(self.rows.times)))
        self._offer_repaired(self.amounts.least())
        if free is not None:
            self._offer_repaired(free.states)
        self._raise(prices.bound, is_relaxed=True)
        if self._is_proven():
            return
        if self.best is not None:
            prices.add(self.best.states)
        prices.run(PRICE_STEPS, max(self.search.tolerance, 1e-9))
        self._raise(prices.bound, is_relaxed=True)
        self.prices, self.active = prices.best, prices.active
        choices = sorted(prices.choices, key=lambda choice: choice.cost)
        self.met += [choice.states for choice in choices]
        for choice in choices[:MAX_REPAIRS]:
            self._offer_repaired(choice.states)
        self._offer_flipped([choice.states for choice in choices[: 2 * MAX_REPAIRS]])

    def _wide(self) -> None:
        """Solves a wide graph, whose minima are expensive: prices rise by exact minima or with messages, then choices are improved."""
        known = self.known
        if known is None and len(self.graph.nodes()) <= MAX_FREE:
            free = minimise(self.graph, self.search)
            known = None if free is None else Known((tuple(free.states),), free.bound)
        if known is not None:
            for states in known.choices:
                self._offer_repaired(states)
            self._raise(known.lower_bound, is_relaxed=True)
            self._offer_flipped(known.choices)
            self.search.tolerance = max(self.search.tolerance, known.near if self._gap() <= known.near else 0.0)
            if self._is_proven() or (not self._is_closable(self.graph) and self._by_planes(known)):
                return
        ascent = Ascent(self.graph, self.amounts, self.search, ASCENT_SHARE)
        ascent.start()
        random = np.random.default_rng(0)

        def offer(states: list[int], worth: bool) -> float:
            if worth:
                self._offer_repaired(states)
                passes = takewhile(lambda _: not self.search.expired(), range(FOREST_PASSES))
                descend_forests(self.graph, self.amounts, self.rows.weights(ascent.prices), states, passes, random)
                self._offer_repaired(states)
            return min(self.cutoff, np.inf if self.best is None else self.best.cost) - self.graph.base

        # A problem that will be closed needs no good prices.
        steps = PRICE_STEPS if self._is_closable(self.graph) else PRICE_STEPS * 4 ** max(self.search.effort - 1, 0)
        ascent.run(steps, offer)
        offer(ascent.dual.decode(), True)
        # Cutting planes may have found better prices.
        if ascent.bound + self.graph.base >= self.bound or not self.active:
            self.prices, self.beliefs, self.active = ascent.prices, ascent.best, np.flatnonzero(ascent.prices).tolist()
        self._raise(ascent.bound + self.graph.base, is_relaxed=True)

    def _by_planes(self, known: Known) -> bool:
        """Finds prices by exact minima; returns whether no other prices give a much better bound."""
        prices = WidePrices(self.graph, self.amounts, self.search, self.bound, known)
        if self.best is not None:
            prices.add(self.best.states)
        tolerance = min(self.search.tolerance, NEAR_ENOUGH)
        for _ in range(PLANES):
            at, most = prices.step()
            self.prices, self.active = prices.best, prices.active
            enough = min(self.cutoff, np.inf if self.best is None else self.best.cost * (1 - max(tolerance, EQUAL)))
            if prices.are_spent(most, enough, tolerance):
                break
            choice = None if self.search.expired() else prices.evaluate_below(at, enough)
            if choice is None or prices.is_loose:
                return False
            self.met.append(choice.states)
            self._offer_repaired(choice.states)
            self._raise(prices.bound, is_relaxed=True)
            if self.bound >= self.cutoff or self._gap() <= max(self.search.tolerance / 2 if prices.has_missed else tolerance, EQUAL):
                break
        choices = sorted(prices.choices, key=lambda choice: choice.cost)
        self._offer_flipped([choice.states for choice in choices if np.isfinite(choice.cost)])
        return True

    def _polish(self) -> None:
        """Runs rounds of improvement: as many as the effort allows, or with a deadline as many as the time allows."""
        if self.best is not None:
            polish = Polish(self.graph, self.amounts, self.rows.weights(self.prices), self.best.states, self.search)
            polish.run(4**self.search.effort // 4 if self.search.left() is None else MAX_ROUNDS, self.bound)
            self._offer(polish.best.states)

    def _close(self) -> None:
        """Drops states that no better choice has; then tries all choices, or an integer program if it is small enough."""
        if self.search.expired():
            return
        core = self.graph.copy()
        known = min(self.cutoff, np.inf if self.best is None else self.best.cost)
        left = self._prune(core, known)
        self.search.reach("variables", num_variables(core))
        is_smaller = self._num_states(core) <= SMALLER * self._num_states(self.graph)
        if left and not (is_smaller or self._is_closable(core) or order_for(core, self.rows)):
            return
        if not left or not shrink(core, self.search, self.rows):
            # No choice costs less than the known one.
            self.bound = known
        elif self._is_exhausted(core, known):
            self.bound = min(known, np.inf if self.best is None else self.best.cost)
        elif self._is_closable(core) and not self.search.expired():
            from spmdctx.search.solver.limited.program import integer_optimum  # SciPy takes long to import

            found_states, bound = integer_optimum(core, Amounts(core, self.rows), self.active, known, self.search.left())
            for states in found_states:
                self._offer(core.complete(states))
                self._offer_repaired(core.complete(states))
            self._raise(min(bound, known, np.inf if self.best is None else self.best.cost))
        elif is_smaller and is_narrow(core):
            self._descend(core, known)

    def _is_exhausted(self, core: CostGraph, known: float) -> bool:
        """Offers the best of all choices if they are few enough; returns whether they were."""
        choices = enumerate_choices(core, self.rows)
        if choices is not None:
            found = self._enumerated(core, choices)
            if isinstance(found, Minimum):
                self._offer(core.complete(found.states))
            return True
        best = cheapest_fitting(core, Amounts(core, self.rows), self.prices, known, self.search.expired)
        if best is not None and best.states is not None:
            self._offer(core.complete(best.states))
        return best is not None

    def _descend(self, core: CostGraph, known: float) -> None:
        """Solves the pruned graph as a problem of its own, because a graph that was too wide may be narrow now."""
        inner = Constrained(core, self.rows, self.search, cutoff=self.cutoff)
        found = inner.run()
        if isinstance(found, Infeasible):
            # The inner search may have ended early, so only its bound counts.
            self._raise(min(inner.bound, known))
            return
        self._offer(core.complete(found.states))
        self._raise(min(found.bound, known))

    @staticmethod
    def _num_states(graph: CostGraph) -> int:
        return sum(graph.size(node) for node in graph.nodes())

    def _is_closable(self, graph: CostGraph) -> bool:
        """Returns whether the graph's integer program is small enough, also for the work that is left."""
        count = num_variables(graph)
        return count <= most_variables(self.search.effort) and count * ROOT_WORK <= graph.pool.allowance.left

    def _prune(self, core: CostGraph, known: float) -> bool:
        """Removes the states whose bound is above the cost of a known choice; returns False if a node has none left."""
        if np.isinf(known):
            return True
        if self.beliefs is None:
            other = priced(self.graph, self.amounts, self.prices)
            dual = Dual(other)
            dual.sweep(PRUNING_SWEEPS, self.search.expired)
            found, shift = dual.bound(), other.base - float(self.prices.sum()) * self.rows.limit
        else:
            found, shift = self.beliefs, self.graph.base
        self._raise(found.value + shift, is_relaxed=True)
        most = known - shift + 1e-12 * (abs(known) + abs(shift))
        kept = {node: np.flatnonzero(beliefs <= most) for node, beliefs in found.beliefs.items()}
        if any(not len(states) for states in kept.values()):
            return False
        core.restrict({node: states for node, states in kept.items() if len(states) < core.size(node)})
        return True

    def _assignment(self, states: Sequence[int]) -> Selection:
        return Selection(self.graph, self.amounts, states)

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

    def _offer_flipped(self, choices: Sequence[Sequence[int]]) -> None:
        """Offers the best choice with parts of the others: little work, so also where the gap is small enough, but not zero."""
        for states in choices:
            if self.best is not None and self.bound < self.cutoff and self._gap() > EQUAL:
                found = self._assignment(self.best.states)
                found.flip(states)
                found.improve(self.search.expired)
                self._offer(found.states)

    def _gap(self) -> float:
        """Returns the distance of the bound from the best cost, relative to it."""
        if self.best is None:
            return np.inf
        return (self.best.cost - self.bound) / max(abs(self.best.cost), 1e-300)

    def _is_proven(self) -> bool:
        """Returns whether the best choice is near enough, or no choice is below the cutoff."""
        return self.bound >= self.cutoff or self._gap() <= max(self.search.tolerance, EQUAL)

    def _enumerated(self, graph: CostGraph, choices: Enumerated) -> Minimum | Infeasible:
        """Returns the best of all choices, as present states of the graph."""
        self.search.count("enumerated", len(choices.costs))
        finite = np.isfinite(choices.costs)
        usage = np.where(finite, choices.usage, np.inf)
        costs = np.where((usage <= self.rows.most).all(axis=0), choices.costs, np.inf)
        index = int(costs.argmin())
        if np.isfinite(costs[index]):
            return Minimum(states_at(choices, index, len(graph.unary)), float(costs[index]), float(costs[index]))
        return infeasible(self.rows, usage.min(axis=1), usage[:, int(usage.max(axis=0).argmin())])

    def _infeasible(self, least: FloatArray) -> Infeasible:
        """Names the memory that cannot be met.

        Sets `best` if the search for the smallest limit finds a choice that fits after all.
        """
        if not has_hard_tables(self.graph):
            return infeasible(self.rows, least, least)
        if self.search.expired():
            return infeasible(self.rows, least, np.full(len(least), np.inf))
        found = None
        if self._is_closable(self.graph):
            from spmdctx.search.solver.limited.program import lowest_peak  # SciPy takes long to import

            found = lowest_peak(self.graph, self.amounts)
        if found is None:
            found = smallest(self.graph, self.amounts, self.search)
        if found is None:
            return infeasible(self.rows, least, np.full(len(least), np.inf))
        self._offer_repaired(found)
        return infeasible(self.rows, least, self.amounts.usage(found))


def infeasible(rows: Rows, least: FloatArray, smallest: FloatArray) -> Infeasible:
    """Names the row that cannot be met: the one with the highest least usage.

    If each row can be met alone, it is the row with the highest usage in the smallest choice.
    """
    row = int(least.argmax())
    if least[row] <= rows.most:
        row, least = int(smallest.argmax()), smallest
    return Infeasible(int(rows.times[row]), float(least[row]), float(smallest.max()))
