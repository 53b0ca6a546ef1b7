"""The cheapest plan of one mesh within a memory budget: the attempts of a schedule, each of which tries limits for the solver.

The solver counts stored values, gathered copies, and the copies that ops make for themselves at the peak of a plan that does not
fit. The bytes alive there beyond these (values that are free to place, results on their way) are taken from the solver's limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmdctx.cost.bill import Bill
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.search.dynamic.account import Account
from spmdctx.search.dynamic.effort import PRICED, Attempt, Standing
from spmdctx.search.dynamic.formulation import Formulation, MeshProblem
from spmdctx.search.dynamic.results import Beaten, DynamicOptions, Found, Shortfall, better, standing_of
from spmdctx.search.dynamic.run import Run
from spmdctx.search.problem.tables import Tables
from spmdctx.search.solver.problem.problem import Solution

_ATTEMPT_WORK = 2e7
"""Additions that take as long as an attempt does beyond the solver's."""

_FAR = 4.0
"""Multiple of the gap at which a plan of a mesh's starts is near enough, up to which mixed layers may bring it there."""


class Budget(Account):
    """Searches meshes within a memory budget; see `Account` for what it is made of.

    `fitting` has the choices of states of which the plans are made that were found, by mesh, `costs_s` their costs.
    """

    def __init__(self, formulation: Formulation[Tables], options: DynamicOptions, fastest: Bill) -> None:
        super().__init__(formulation, options, fastest)
        self.fitting: dict[LogicalMesh, tuple[tuple[int, ...], ...]] = {}
        self.costs_s: dict[LogicalMesh, float] = {}
        self._ends: dict[LogicalMesh, tuple[Standing, Found | Shortfall | Beaten]] = {}

    def search_on(self, mesh: MeshProblem, known_s: float) -> Found | Shortfall | Beaten:
        """Finds the cheapest plan of a mesh whose peak is in the budget, if it can be below `known_s`, by the schedule's first attempts.

        The long attempt finds a plan within every budget in which a short one does. Errors name budgets and device counts
        that short attempts find, so these suffice. A plan of the mesh's starts that is near enough needs none. One that is not is kept
        for want of a better one.
        """
        found = self._from_starts(mesh, known_s) if mesh.near else None
        if found is not None and found.cost_s * (1 - mesh.near) <= mesh.lower_bound_s:
            self._ends[mesh.fastest.setup.mesh] = standing_of(found, known_s, has_run_out=False), found
            return found
        return self._search(mesh, self.schedule.attempts, Standing(known_s), found)

    def _from_starts(self, mesh: MeshProblem, known_s: float) -> Found | None:
        """Returns a plan that follows from the choices at which the search may start, after little work."""
        run, own = Run(self, mesh._replace(near=1.0), self.schedule.attempts[0].effort, known_s), mesh.fastest.setup.mesh
        found = run.result()
        self.spent += run.allowance.spent + _ATTEMPT_WORK
        if not isinstance(found, Found):
            return None
        if found.cost_s * (1 - _FAR * mesh.near) <= mesh.lower_bound_s:
            found = run.with_layers_mixed(found)
        self.fitting[own], self.costs_s[own] = run.made_of, found.cost_s
        return found

    def search_later(self, mesh: MeshProblem, known_s: float) -> Found | Shortfall | Beaten:
        """Goes on from the first attempts on a mesh with those that come later."""
        standing, result = self._ends[mesh.fastest.setup.mesh]
        return self._search(mesh, self.schedule.later, standing._replace(known_s=known_s), result)

    def search_alone(self, mesh: MeshProblem, known_s: float) -> Found | Shortfall | Beaten:
        """Makes all attempts on the only mesh there is."""
        self.search_on(mesh, known_s)
        return self.search_later(mesh, known_s)

    def bound_at_prices(self, mesh: MeshProblem, known_s: float) -> float:
        """Returns a bound of a mesh's plans within the budget: at the last prices of memory, after little work."""
        prices = self.prices
        run = Run(self, mesh, PRICED, known_s)
        _, solution = run.solved()
        self.spent += run.allowance.spent + _ATTEMPT_WORK
        self.prices = prices
        return solution.lower_bound if isinstance(solution, Solution) else solution.lower_bound_s

    def _search(
        self, mesh: MeshProblem, attempts: Sequence[Attempt], standing: Standing, result: Found | Shortfall | Beaten | None
    ) -> Found | Shortfall | Beaten:
        own, known_s = mesh.fastest.setup.mesh, standing.known_s
        for attempt in attempts:
            if not attempt.when(standing):
                continue
            # A plan that is there before any attempt comes from the mesh's starts.
            is_from_fitting = own in self.fitting and (standing.is_begun or result is None)
            start = mesh._replace(starts=self.fitting[own], near=0.0) if is_from_fitting else mesh
            run = Run(self, start, attempt.effort, min(known_s, standing.cost_s))
            if mesh.insists or isinstance(result, Found):
                run.lift()
            later = run.result()
            self.spent += run.allowance.spent + _ATTEMPT_WORK
            later = self._mixed(run, later, result, self.fitting.get(own, ()))
            if isinstance(result, Shortfall) and isinstance(later, Shortfall):
                later = later._replace(is_cut=(result.is_cut or later.is_cut) and not later.is_proven)
            result = better(result, later, known_s)
            standing = standing_of(result, known_s, has_run_out=run.has_run_out)
            if run.made_of:
                self.fitting[own] = run.made_of
                self.costs_s[own] = min(standing.cost_s, self.costs_s.get(own, math.inf))
        assert result is not None, "a schedule begins with an attempt"
        self._ends[own] = standing, result
        return result

    @staticmethod
    def _mixed(
        run: Run, later: Found | Shortfall | Beaten, earlier: Found | Shortfall | Beaten | None, made_of: tuple[tuple[int, ...], ...]
    ) -> Found | Shortfall | Beaten:
        """Returns what an attempt found, with its layers mixed; where it found no plan, the earlier one with layers that it has met."""
        if isinstance(later, Found):
            return run.with_layers_mixed(later)
        if not (isinstance(earlier, Found) and isinstance(later, Shortfall) and made_of):
            return later
        mixed = run.with_layers_mixed(earlier, made_of)
        return later if mixed is earlier else mixed
