"""The solver's entry: the least cost, or the least cost that fits the memory, each with a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import numpy as np

from spmdctx.ir.arrays import IntArray
from spmdctx.search.solver.limited.constrained import Constrained, most_variables
from spmdctx.search.solver.problem.allowance import Allowance
from spmdctx.search.solver.problem.graph import CostGraph, cost_of
from spmdctx.search.solver.problem.local import totals
from spmdctx.search.solver.problem.memory import Rows
from spmdctx.search.solver.problem.pool import Pool
from spmdctx.search.solver.problem.problem import Infeasible, Known, Problem, Solution
from spmdctx.search.solver.unlimited.dominance import supported
from spmdctx.search.solver.unlimited.dual import Resumed
from spmdctx.search.solver.unlimited.energy import Minimisation, Minimum, minimise, shrink
from spmdctx.search.solver.unlimited.run import SWEEPS, WORK, SolverRun

HOPELESS = Infeasible(-1, 0.0, float("inf"))
"""The answer if no choice of states has a finite cost, whatever the memory."""


def solve(
    problem: Problem,
    *,
    effort: int = 2,
    tolerance: float = 0.0,
    cutoff: float = float("inf"),
    deadline: float | Callable[[], bool] | None = None,
    known: Known | None = None,
    allowance: Allowance | None = None,
) -> Solution | Infeasible:
    """Chooses the states of least cost that fit the memory.

    The result depends on the arguments only, unless a deadline stops it.

    Args:
        problem: Costs, tables and memory.
        effort: How much work may go into closing the gap, 0 to 5; each step allows four times more. Small and narrow problems are
            solved exactly at any effort.
        tolerance: The gap, relative to the cost, at which to stop.
        cutoff: A cost that the caller has already: once nothing here can be below it, the best so far is returned with its bound.
        known: What is known of the problem without its memory or with more of it: the first choice of a wide problem.
        allowance: The additions that this and other searches may make together; charged. Once it is spent, the best so far is returned.
        deadline: Seconds from now, or a function that says that the time is over. For benchmarks.

    Returns:
        A solution and its lower bound, equal to the cost if it is proven optimal, or the memory that cannot be met. If nothing is finite,
        `Infeasible` at time -1 with an infinite limit. The limit that it names works, and is the smallest if no pair of states is
        forbidden or the problem is small. A large problem with forbidden pairs may be called infeasible because none that fits was found.
    """
    spent = None if allowance is None else _Spent(allowance)
    if deadline is None:
        deadline = spent
    graph = CostGraph.of(problem.costs, problem.edges, Pool(allowance))
    search = _search(effort, tolerance, cutoff, deadline)
    met: tuple[tuple[int, ...], ...] = ()
    prices: tuple[tuple[int, float], ...] = ()
    relaxed: float | None = None
    with np.errstate(invalid="ignore"):
        if not supported(graph):
            return HOPELESS
        rows = None if problem.memory is None else Rows(problem.memory, graph.origin)
        if rows is None or not len(rows.times):
            search.has_momentum = True
            found: Minimum | Infeasible | None = minimise(graph, search)
        elif shrink(graph, search, rows):
            # Prices are minima of other costs, to which the cutoff does not apply.
            search.cutoff = float("inf")
            within = Constrained(graph, rows, search, None if known is None else _present(graph, rows, known), cutoff)
            if spent is not None:
                spent.within = within
            found = within.run()
            met = tuple([tuple(graph.complete(states)) for states in within.met])
            prices, relaxed = rows.at_times(within.prices), within.relaxed
        else:
            found = None
    solution = _solution(problem, graph, found, search)
    if isinstance(solution, Solution):
        relaxed = None if relaxed is None else min(relaxed, solution.lower_bound)
        return solution._replace(met=met, prices=prices, relaxed=relaxed)
    return solution


def may_be_proven(found: Solution, effort: int) -> bool:
    """Returns whether more effort, up to this one, is likely to close the gap that was left within memory, in little time."""
    return found.counts.get("variables", 0) <= most_variables(effort) // 2


class Sought:
    """A problem without memory that may be solved in several steps.

    Args:
        problem: Costs and tables; its memory is ignored.
        effort: As in `solve`.
        tolerance: As in `solve`.
        alike: Another problem with the same nodes, searched before, that costs nearly the same. It changes the work, not the bound.
        places: With `alike`, for each node the state of the other problem that each of its states resembles, -1 for none.
        is_reused: Whether other searches may start from this one; it then takes more time after its first bounds.
        worth: The share of the best cost by which a bound must lie below it to be tightened around cycles.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        effort: int = 2,
        tolerance: float = 0.0,
        alike: Sought | None = None,
        places: Sequence[IntArray] = (),
        is_reused: bool = False,
        worth: float = 0.0,
    ) -> None:
        self.problem = problem
        search = _search(effort, tolerance, float("inf"), None)
        self._search = replace(search, keeps_states=is_reused, has_momentum=True, worth=worth)
        self._graph = CostGraph.of(problem.costs, problem.edges, Pool())
        before = None if alike is None else alike._minimisation
        dual = None if before is None else before.dual
        resumed = None if dual is None else Resumed(dual, places)
        with np.errstate(invalid="ignore"):
            possible = supported(self._graph)
            self._minimisation: Minimisation | None = Minimisation(self._graph, self._search, resumed) if possible else None

    def look(self, enough: float) -> Solution | Infeasible:
        """Searches for a short time, which is shorter still if the bound reaches `enough`."""
        self._search.enough = enough
        found = self.solve(float("-inf"))
        self._search.enough = float("inf")
        return found

    def solve(self, cutoff: float = float("inf")) -> Solution | Infeasible:
        """Finds the solution that `solve` finds with this cutoff; with a higher cutoff than before it goes on where it stopped."""
        self._search.cutoff = cutoff
        with np.errstate(invalid="ignore"):
            found = None if self._minimisation is None else self._minimisation.run()
        return _solution(self.problem, self._graph, found, self._search)


class _Spent:
    """Says that an allowance is spent, which is first shown the best choice of the search `within` memory, once."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance, self._is_shown = allowance, False
        self.within: Constrained | None = None

    def __call__(self) -> bool:
        allowance, best = self._allowance, None if self.within is None else self.within.best
        if not allowance.is_spent():
            return False
        if self.within is not None and best is not None and allowance.extend is not None and not self._is_shown:
            self._is_shown = True
            allowance.extend(tuple(self.within.graph.complete(best.states)))
        return allowance.is_spent()


def _search(effort: int, tolerance: float, cutoff: float, deadline: float | Callable[[], bool] | None) -> SolverRun:
    return SolverRun(effort, WORK // 16 * 4**effort, min(len(SWEEPS), effort + 3), tolerance, cutoff, *_clock(deadline))


def _solution(problem: Problem, graph: CostGraph, found: Minimum | Infeasible | None, search: SolverRun) -> Solution | Infeasible:
    """Translates a result for the graph to one for the problem."""
    if found is None:
        return HOPELESS
    if isinstance(found, Infeasible):
        return found
    states = tuple(graph.complete(found.states))
    cost = cost_of(problem.costs, problem.edges, states)
    # The cost is summed in another order than the bound; a proven optimum stays proven.
    bound = cost if found.bound == found.cost else min(cost, found.bound)
    return Solution(states, cost, bound, dict(search.counts))


def _present(graph: CostGraph, rows: Rows, known: Known) -> Known:
    """Translates the known choices to present states."""
    return known._replace(choices=tuple(_choice_in(graph, rows, states) for states in known.choices))


def _choice_in(graph: CostGraph, rows: Rows, choice: tuple[int, ...]) -> tuple[int, ...]:
    """Translates a choice to present states.

    A state that was discarded is replaced by the best that uses no more, given its neighbours.
    """
    states, missing = [0] * len(graph.origin), []
    for node, (origin, state) in enumerate(zip(graph.origin, choice, strict=True)):
        place = int(np.searchsorted(origin, state))
        if place < len(origin) and origin[place] == state:
            states[node] = place
        elif graph.alive[node]:
            missing.append(node)
    for node in missing * 2:
        total = totals(graph, node, states)
        used = rows.priced[node]
        if used is not None:
            total = np.where(used[graph.origin[node]] <= used[choice[node]], total, np.inf)
        states[node] = int(total.argmin())
    return tuple(states)


def _clock(deadline: float | Callable[[], bool] | None) -> tuple[Callable[[], float], Callable[[], float | None]]:
    """Returns functions for the share of the time that is over and for the seconds that are left."""
    if deadline is None:
        return lambda: 0.0, lambda: None
    if callable(deadline):
        return lambda: float(deadline()), lambda: None
    start = monotonic()
    return lambda: (monotonic() - start) / deadline, lambda: deadline - (monotonic() - start)
