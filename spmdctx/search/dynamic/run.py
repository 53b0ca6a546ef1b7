"""One attempt at the cheapest plan of a mesh within a budget: the limits that it tries for the solver, and what it makes of solutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from spmdctx.cost.bill import Bill
from spmdctx.cost.memory.lives import Peak
from spmdctx.cost.memory.reserved import ReservedShare
from spmdctx.search.dynamic.account import Account
from spmdctx.search.dynamic.branching import Accepted, Within, cheapest_accepted
from spmdctx.search.dynamic.effort import Effort, Limits
from spmdctx.search.dynamic.formulation import MeshProblem, peak_in
from spmdctx.search.dynamic.plans.mixed import Mixing
from spmdctx.search.dynamic.results import SAME_COST, Beaten, Found, Shortfall, short_of
from spmdctx.search.problem.memory.copies import Passing
from spmdctx.search.problem.memory.reserved import with_reserved
from spmdctx.search.problem.memory.rows import completed, counted_bytes, passing_at, with_memory
from spmdctx.search.problem.memory.stored import on_chip
from spmdctx.search.solver.problem.allowance import Allowance
from spmdctx.search.solver.problem.graph import cost_of
from spmdctx.search.solver.problem.problem import Infeasible, Known, Problem, Solution
from spmdctx.search.solver.solve import may_be_proven, solve

_LEAST_S = 1e-300
"""Takes the place of a cost of zero, of which no share can be taken."""

_LOWER = 0.8
"""The limit of repairs that is tried beside the whole budget, as a share of it."""

_ROUNDS_WHERE_NEAR = 4
"""Limits that are tried where plans are nearly small enough, if the effort tries fewer."""

_NEARLY = 1.06
"""Share of the budget that such plans take at most."""

_LIMIT_SPACING = 0.005
"""Least share of the budget between two limits that are tried for a program that is not small."""


class Run:
    """One attempt. The next limit starts from the last solution.

    After `result`, `fitting` holds the states of the plan that was found, `made_of` all choices of states of which it is made once layers
    are mixed. `has_run_out` says that no limit led to a plan.
    """

    def __init__(self, budget: Account, mesh: MeshProblem, effort: Effort, known_s: float) -> None:
        formulation, small = budget.formulation, budget.options.is_small(budget.formulation.step)
        self._budget, self._mesh, self._effort, self._known_s = budget, mesh, effort, known_s
        self._formulation = formulation
        self._proof = min(effort.proof, budget.left(budget.schedule.proof) / 2)
        self.allowance = Allowance(min(effort.hopeless, budget.left(budget.schedule.hopeless)))
        self._tolerance = max(formulation.limits.tolerance, effort.tolerance)
        full = budget.memory_bytes + (1 + budget.spread) * on_chip(formulation.topology, formulation.step.graph).total_bytes
        self._limits = Limits(full, 0.0 if small else _LIMIT_SPACING * full)
        self._level = effort.level
        if effort.level < 0:
            # Without bounds there is nothing to prove, so that an estimate saves searches.
            self._limits.reserved = budget.reserved
        self._bound_s = mesh.lower_bound_s  # Without a budget, hence within it too.
        self._nearest = Peak(0, 0)
        self._last: tuple[tuple[int, ...], ...] = ()
        self._met: dict[tuple[int, ...], None] = {}
        self._plain: Problem | None = None
        self._copies: dict[Passing, None] = {}
        self._seen: Found | None = None
        self._refined = 0
        self._judged: tuple[Sequence[int], Found, Bill] | None = None
        if not effort.limits_proofs:
            self.allowance.extend = self._goes_on
        self.fitting: tuple[int, ...] = ()
        self.made_of: tuple[tuple[int, ...], ...] = ()
        self.has_run_out = False

    def result(self) -> Found | Shortfall | Beaten:
        """Tries limits until one of them decides the attempt."""
        for number in range(max(self._effort.rounds, _ROUNDS_WHERE_NEAR)):
            if number >= self._effort.rounds and not self._is_nearly_found():
                break
            result = self._round()
            if result is not None:
                return result
        return self._out_of_limits()

    def _is_nearly_found(self) -> bool:
        """Returns whether no plan was found, and the smallest one that was seen takes little more than the budget."""
        return self._seen is None and 0 < self._nearest.bytes <= _NEARLY * self._budget.memory_bytes

    def with_layers_mixed(self, found: Found, earlier: tuple[tuple[int, ...], ...] = ()) -> Found:
        """Returns a plan, or one for which some layers follow one of the plans that the attempt has met, and some another.

        A plan that is so poor that other meshes come first stays as it is.

        Args:
            found: the plan of the attempt, or of an earlier one.
            earlier: the choices of states of which the plan of an earlier attempt is made.
        """
        self.made_of = earlier or ((self.fitting,) if self.fitting else ())
        if not (self._effort.mixes and self.made_of) or self._plain is None or self._is_left(found.cost_s):
            return found
        first, *more = self.made_of
        mixing = Mixing(self._formulation, self._mesh, self._budget.options)
        others = [*more, *self._met, *self._mesh.starts, self._mesh.start()]
        mixed, made_of = mixing.improved(found, first, self._bill_of(first), others, self._plain, self._known_s)
        self.made_of = self.made_of if mixed is found else made_of
        return mixed

    def _bill_of(self, states: tuple[int, ...]) -> Bill:
        self._planned(Solution(states, 0.0, 0.0, {}))
        assert self._judged is not None, "the plan was just made"
        return self._judged[2]

    def _limited(self) -> Problem:
        """Returns the problem of the present limit without what is reserved for results."""
        mesh, memory, only_stored = self._mesh, self._formulation.memory, self._effort.only_stored
        limit, spread = self._limits.limit, self._budget.spread
        return with_memory(mesh.tables, mesh.problem, memory, limit, self._copies, only_stored=only_stored, spread=spread)

    def solved(self) -> tuple[Problem, Solution | Shortfall]:
        """Solves the problem of the present limit; returns it without what is reserved for results, and its solution."""
        mesh, limits = self._mesh, self._limits
        plain = self._plain = self._limited()
        limited = with_reserved(plain, mesh.tables, self._formulation.memory, limits.reserved, self._budget.spread)
        return plain, self._budget.solve_within(limited, mesh.fastest, self._solver(limited))

    def _round(self) -> Found | Shortfall | Beaten | None:
        """Tries one limit; returns None where another try may help."""
        limits = self._limits
        plain, solution = self.solved()
        if limits.reserved and isinstance(solution, Shortfall):
            solution = solution._replace(is_proven=False, lower_bound_s=0.0)
        if limits.proves and isinstance(solution, Solution):
            self._bound_s = max(self._bound_s, self._bound_of(solution))
        if self.allowance.is_spent() and not self._is_near(solution):
            return self._cut(solution)
        if isinstance(solution, Shortfall):
            return self._short(solution)
        if not limits.proves and self._bound_of(solution) >= self._known_s:
            return self._above(limits.limit)
        if self._bound_s >= self._known_s:
            return Beaten(self._bound_s)
        self._keep(solution)
        found, peak, reserved = self._planned(solution)
        fits = peak.bytes <= self._budget.memory_bytes
        if (not fits and self._counts_more(peak)) or self._proves_more(solution):
            return None
        return self._with_plan(found) if fits else self._without_plan(plain, solution, peak, reserved)

    def _bound_of(self, solution: Solution) -> float:
        """Returns a bound of all plans within the limit of a solution, in which layers that decide together may decide apart."""
        if solution.relaxed is None or self._mesh.tables.network.layers is None:
            return solution.lower_bound
        return solution.relaxed

    def _is_near(self, solution: Solution | Shortfall) -> bool:
        """Returns whether the solver ended with a solution that is near enough to its bound, not for want of work."""
        return isinstance(solution, Solution) and solution.cost - solution.lower_bound <= max(self._tolerance, SAME_COST) * solution.cost

    def _keep(self, solution: Solution) -> None:
        """Keeps the choices of a solution, from which the next limit starts."""
        count = len(self._mesh.tables.choices)
        self._last = tuple([states[:count] for states in (solution.states, *solution.met)])
        self._met.update(dict.fromkeys(self._last))

    def _solver(self, limited: Problem) -> Callable[[Problem], Solution | Infeasible]:
        """Returns the solver, which starts where earlier searches ended."""
        how = partial(solve, tolerance=self._tolerance, cutoff=self._known_s, effort=self._level, allowance=self.allowance)

        def solver(problem: Problem) -> Solution | Infeasible:
            if self.allowance.is_spent():
                return Infeasible(-1, math.inf, math.inf, is_proven=False, lower_bound=0.0)
            starts = [states for states in (self._mesh.start(), *self._mesh.starts, *self._last) if len(states)]
            choices = tuple(completed(limited, states) for states in starts)
            return how(problem, known=Known(choices, self._bound_s, self._budget.prices, self._mesh.near) if choices else None)

        return solver

    def _planned(self, solution: Solution) -> tuple[Found, Peak, Sequence[ReservedShare]]:
        """Returns the plan of a solution, its peak, and what it has XLA reserve for results."""
        states = solution.states[: len(self._mesh.tables.choices)]
        if self._judged is None or self._judged[0] != states:
            found = self._formulation.plan_of(self._mesh.fastest.setup, self._mesh.tables, solution)
            self._judged = states, found, self._formulation.bill_of(found)
        _, found, bill = self._judged
        peak = peak_in(bill, is_likely=self._budget.options.is_likely)
        return found._replace(cost_s=solution.cost, lower_bound_s=self._bound_s, counts=solution.counts), peak, bill.reserved

    def _goes_on(self, states: Sequence[int]) -> None:
        """Lets the solver go on behind the allowance if the plan of its best choice fits, and other meshes do not come first."""
        cost_s = cost_of(self._mesh.problem.costs, self._mesh.problem.edges, tuple(states)[: len(self._mesh.tables.choices)])
        _, peak, _ = self._planned(Solution(tuple(states), cost_s, 0.0, {}))
        if peak.bytes <= self._budget.memory_bytes and not self._is_left(cost_s):
            self.lift()

    def _is_left(self, cost_s: float) -> bool:
        """Returns whether other meshes come first, since a plan of this cost is far from what the mesh could have without a budget."""
        return self._mesh.has_others and cost_s > self._mesh.lower_bound_s * (1 + self._effort.leaves)

    def lift(self) -> None:
        """Goes on within the limit for proofs, as a plan is known, unless the effort limits proofs like the rest."""
        if not self._effort.limits_proofs:
            self.allowance.most = max(self.allowance.most, self._proof)

    def _cut(self, solution: Solution | Shortfall) -> Found | Shortfall | None:
        """Ends the attempt whose allowance is spent; goes on within the effort's limit for proofs if the states so far are a plan."""
        if isinstance(solution, Solution):
            self._keep(solution)
            found, peak, _ = self._planned(solution)
            if peak.bytes <= self._budget.memory_bytes:
                if self._seen is None or found.cost_s < self._seen.cost_s:
                    self._seen, self.fitting = found, self._last[0]
                if not self._is_left(found.cost_s):
                    self.lift()
                if not self.allowance.is_spent():
                    return None
            elif not self._nearest.bytes or peak.bytes < self._nearest.bytes:
                self._nearest = peak
        if self._seen is not None:
            return self._seen
        if isinstance(solution, Shortfall) and solution.is_proven:
            return solution
        self.has_run_out = True
        return self._short_of_all()._replace(is_cut=True)

    def _short_of_all(self) -> Shortfall:
        nearest = self._nearest if self._nearest.bytes else self._budget.fastest_peak
        return short_of(nearest, self._mesh.fastest, self._bound_s)

    def _short(self, shortfall: Shortfall) -> Found | Shortfall | None:
        """Goes on at a higher limit, unless the whole budget is too small."""
        limits = self._limits
        if limits.proves and self._seen is None:
            return shortfall._replace(lower_bound_s=max(shortfall.lower_bound_s, self._bound_s))
        if limits.is_full and self._seen is None:
            limits.without_reserved()
            return self._out_of_limits() if limits.is_exhausted else None
        # Too many bytes were taken off for a plan with many copies. Take off at most so many that the smallest feasible limit is left.
        return self._above(max(limits.limit, shortfall.enough_bytes - (self._budget.memory_bytes - limits.limit)))

    def _above(self, low: float) -> Found | Shortfall | None:
        self._limits.raise_to(low)
        return self._out_of_limits() if self._limits.is_exhausted else None

    def _counts_more(self, peak: Peak) -> bool:
        """Adds the copies that ops make at the peak of a plan that does not fit; returns whether any was not counted yet."""
        if not self._nearest.bytes or peak.bytes < self._nearest.bytes:
            self._nearest = peak
        copies = dict.fromkeys(passing_at(self._mesh.tables.network, self._formulation.memory, peak.time))
        if not self._effort.counts_copies or self._copies.keys() >= copies.keys():
            return False
        self._copies |= copies
        return True

    def _proves_more(self, solution: Solution) -> bool:
        """Raises the effort by one level if that is likely to prove the solution, and returns whether it did.

        Only the first problem that is worth it gets the level, which then stays.
        """
        is_first = self._effort.proves and self._level == self._effort.level
        if self._is_near(solution) or not is_first or not may_be_proven(solution, self._level + 1):
            return False
        self._level += 1
        return True

    def _with_plan(self, found: Found) -> Found | Shortfall | None:
        """Keeps a plan that fits; returns the best one if more effort is not worth it."""
        self.lift()
        if self._seen is None or found.cost_s <= self._seen.cost_s:
            self._seen, self.fitting = found, self._last[0]
        if self._refined < self._effort.refines:
            self._refined += 1
            if not self._limits.is_full:
                return self._above(self._limits.limit)
            # Choices that were repaired within less memory are sometimes cheaper.
            self._limits.limit *= _LOWER
            return None
        gap_s, is_beaten = self._seen.cost_s - self._bound_s, self._seen.cost_s > self._known_s
        if self._level > self._effort.level or is_beaten or gap_s <= self._effort.insists * max(self._seen.cost_s, _LEAST_S):
            return self._seen._replace(lower_bound_s=self._bound_s)
        self._level += 1
        return None

    def _without_plan(self, plain: Problem, solution: Solution, peak: Peak, reserved: Sequence[ReservedShare]) -> Found | Shortfall | None:
        """Tries plans one by one if the effort allows it, then goes on with what the plan reserves for results, or at a lower limit."""
        if self._seen is not None and self._level > self._effort.level:
            return self._seen._replace(lower_bound_s=self._bound_s)
        limits = self._limits
        if limits.proves and self._effort.branches:
            best = self._branched(plain, solution)
            if best.found is None and self.allowance.is_spent():
                return self._cut(solution)
            if not best.is_cut:
                return short_of(self._nearest, self._mesh.fastest, self._bound_s) if best.found is None else best.found
            self._seen, self._bound_s = best.found, max(self._bound_s, best.lower_bound)
        high = counted_bytes(plain, solution.states)
        if reserved and not limits.ignores_reserved:
            limits.reserve(reserved, high, self._budget.memory_bytes - (peak.bytes - high))
            estimated = with_reserved(plain, self._mesh.tables, self._formulation.memory, limits.reserved, self._budget.spread)
            high = counted_bytes(estimated, solution.states)
            if high > limits.limit:
                return None
        limits.lower_to(high, self._budget.memory_bytes - (peak.bytes - high))
        return self._out_of_limits() if limits.is_exhausted else None

    def _branched(self, limited: Problem, first: Solution) -> Accepted[Found]:
        """Finds the cheapest assignment whose peak is in the budget, among those whose counted peak is."""
        mesh, formulation = self._mesh, self._formulation

        def accept(solution: Solution) -> Found | None:
            found = formulation.plan_of(mesh.fastest.setup, mesh.tables, solution)
            if not formulation.fits(found, self._budget.memory_bytes, is_likely=self._budget.options.is_likely):
                return None
            self.lift()
            return found

        solver = partial(solve, tolerance=self._tolerance, allowance=self.allowance)
        within = Within(self._effort.work, self._tolerance, self.allowance.is_spent)
        best = cheapest_accepted(mesh.tables, limited, first, solver, accept, within)
        return best if best.found is None else best._replace(found=best.found._replace(lower_bound_s=best.lower_bound))

    def _out_of_limits(self) -> Found | Shortfall:
        self.has_run_out = self._seen is None
        return short_of(self._nearest, self._mesh.fastest, self._bound_s) if self._seen is None else self._seen
