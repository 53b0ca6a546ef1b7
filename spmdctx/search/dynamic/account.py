"""What a search within a memory budget may use, and what it has used: the solver's additions, and the last prices of memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from spmdctx.cost.bill import Bill
from spmdctx.machine.xla.memory.spread import spread_on
from spmdctx.search.dynamic.effort import Schedule
from spmdctx.search.dynamic.formulation import Formulation, peak_in
from spmdctx.search.dynamic.results import DynamicOptions, Found, Shortfall, short_of
from spmdctx.search.problem.memory.rows import least_peak, op_at
from spmdctx.search.problem.tables import Tables
from spmdctx.search.solver.problem.problem import Infeasible, Problem, Solution


class Account:
    """The budget of a search, and the work that is left for it.

    Args:
        formulation: states the step's problem.
        options: the budget, and how much it is worth.
        fastest: bill of the fastest plan of all.

    `spent` are the additions of all attempts. `prices` are the last prices of memory that were found on any mesh; they are mostly near
    those of the next. `reserved` is what the fastest plan has XLA reserve for results.
    """

    def __init__(self, formulation: Formulation[Tables], options: DynamicOptions, fastest: Bill) -> None:
        self.formulation, self.options = formulation, options
        self.fastest_peak, self.reserved = peak_in(fastest, is_likely=options.is_likely), fastest.reserved
        self.schedule = options.schedule_of(formulation.step)
        self.memory_bytes = options.memory_bytes or 0
        self.spread = 0.0 if options.is_likely else spread_on(formulation.topology.device).least_share(self.memory_bytes)
        self.spent = self._before = 0.0
        self.prices: tuple[tuple[int, float], ...] = ()

    def begin(self, schedule: Schedule) -> None:
        """Takes another schedule, whose work is limited by itself, and which finds what it finds alone."""
        self.schedule, self._before, self.prices = schedule, self.spent, ()

    def left(self, additions: float) -> float:
        """Returns what is left of the additions that a schedule may make."""
        return max(0.0, additions - (self.spent - self._before))

    def solve_within(self, limited: Problem, fastest: Found, solver: Callable[[Problem], Solution | Infeasible]) -> Solution | Shortfall:
        """Finds the best choice of states within the limit of a problem, which may be below the user's budget."""
        assert limited.memory is not None
        limit, memory = limited.memory.limit, self.formulation.memory
        spare = self.memory_bytes - limit
        least = least_peak(limited)
        if least.bytes > limit:
            alive = int(least.bytes + spare)
            return Shortfall(op_at(memory, least.time), alive, alive, fastest, is_proven=True, lower_bound_s=math.inf)
        solution = solver(limited)
        if isinstance(solution, Solution):
            self.prices = solution.prices or self.prices
            return solution
        bound_s = 0.0 if solution.is_proven else solution.lower_bound
        if math.isinf(solution.smallest_limit):
            # The bytes of the fastest plan are the only limit known to suffice.
            return short_of(self.fastest_peak, fastest, bound_s)
        alive, enough = int(solution.least_usage + spare), int(solution.smallest_limit + spare)
        return Shortfall(op_at(memory, solution.time), alive, enough, fastest, lower_bound_s=bound_s)
