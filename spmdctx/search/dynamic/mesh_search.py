"""The search of one mesh after the other: a first, short search, the fastest plan, and the cheapest plan within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from spmdctx.cost.step import Step
from spmdctx.ir.mesh import AnyOrder, AnySizes, LogicalMesh
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.budget import Budget
from spmdctx.search.dynamic.formulation import Formulation, MeshProblem
from spmdctx.search.dynamic.results import SAME_COST, Beaten, DynamicOptions, Found, Shortfall, short_of
from spmdctx.search.problem.orbits import Precedents, merged, resembling
from spmdctx.search.problem.tables import Tables
from spmdctx.search.setup.meshes import MAX_AXES
from spmdctx.search.setup.request import Setup
from spmdctx.search.solver.problem.graph import cost_of
from spmdctx.search.solver.problem.problem import Infeasible, Problem, Solution
from spmdctx.search.solver.solve import Sought

MODE = "dynamic_programming"

_HARDLY = 1e-8
"""Share of a known plan's seconds by which a bound may lie below them and still end a first look."""

_CLOSE = 1e-7
"""The same where meshes of several sizes are looked at together."""

_WORTH = 1e-3
"""Share of its seconds by which another mesh of several axes must be able to improve a large program's plan."""

_WORTH_TIGHTENING = 5e-3
"""Share of a large program's best plan by which a bound must lie below it to be tightened around cycles, which takes long."""

_AS_NEAR = 1.15
"""Multiple of the gap of a plan of another program at which the first plan of one alike is near enough."""


class _Begun(NamedTuple):
    """A mesh's problem without memory, and the solution of a first, short search, if there was one."""

    tables: Tables
    sought: Sought
    solution: Solution | None = None


class _Unsolved(NamedTuple):
    """The cutoff below which a mesh has no plan, and the search that says so if it was one of several orders of the mesh's axes."""

    cutoff: float
    alike: _Begun | None = None


class _Choice(NamedTuple):
    """The problem of a mesh, and the states and cost there of the choice for several orders of its axes."""

    tables: Tables
    problem: Problem
    states: tuple[int, ...]
    cost: float


class MeshSearch:
    """Searches single meshes, and keeps the solutions from which later searches of them start."""

    def __init__(self, step: Step, topology: Topology, options: DynamicOptions) -> None:
        self.formulation: Formulation[Tables] = Formulation(step, topology, options.limits, Tables, mode=MODE, folding=options.folding)
        self.is_small = options.is_small(step)
        self._begun: dict[LogicalMesh, _Begun] = {}
        self._in_any_order: dict[LogicalMesh, _Begun] = {}
        self._tables: dict[LogicalMesh, Tables] = {}
        self._solved: dict[LogicalMesh, tuple[Tables, Problem]] = {}
        self._starts: dict[LogicalMesh, Sequence[int]] = {}
        self._unsolved: dict[LogicalMesh, _Unsolved] = {}
        self._choices: dict[LogicalMesh, _Choice] = {}
        self._decided: dict[LogicalMesh, Found | Shortfall] = {}

    @property
    def joins_orders(self) -> bool:
        """Whether first looks are worth a search of several orders of a mesh's axes at once, which proves less of each."""
        return not self.is_small

    def first_look(self, setup: Setup, known_s: float = math.inf) -> Solution:
        """Searches a mesh, or several orders of its axes at once, for a short time; another mesh has a plan of `known_s`."""
        begun = self._begin(setup)
        solution = self.formulation.look(begun.sought, known_s * (1 - _HARDLY))
        self._begun[setup.mesh] = begun._replace(solution=solution)
        return solution

    def first_plan(self, setup: Setup) -> Callable[[], Found]:
        """Returns a function that makes the plan of the first, short search of a mesh."""
        begun = self._begun[setup.mesh]
        assert begun.solution is not None
        return partial(self.formulation.plan_of, setup, begun.tables, begun.solution)

    def fastest_on(self, setup: Setup, known_s: float) -> Found | Beaten:
        """Finds the cheapest plan on a mesh, whatever memory it takes, if there is one below `known_s`."""
        cutoff = self.cutoff(setup.mesh, known_s)
        begun = self._begun.pop(setup.mesh, None)
        if begun is None:
            alike = self._in_any_order.pop(setup.mesh, None)
            if alike is not None and alike.solution is not None and _is_beaten(alike.solution, cutoff, known_s):
                self._unsolved[setup.mesh] = _Unsolved(cutoff, alike)
                return Beaten(alike.solution.lower_bound)
            found = self._fastest_of_merged(setup, known_s) if alike is None else self._as_in_any_order(setup, alike, known_s)
            if found is not None:
                return found
            begun = self._begin(setup, alike)
        tables, sought, solution = begun
        if solution is not None:
            self._starts[setup.mesh] = solution.states
            if solution.lower_bound >= cutoff:
                return Beaten(solution.lower_bound)
        if solution is None or solution.lower_bound != solution.cost:
            solution = self.formulation.solve(sought, cutoff)
        self._starts[setup.mesh] = solution.states
        if _is_beaten(solution, cutoff, known_s):
            return Beaten(solution.lower_bound)
        self._keep(setup.mesh, tables, sought.problem)
        return self.formulation.plan_of(setup, tables, solution)

    def bound_in_any_order(self, setup: Setup, meshes: Sequence[LogicalMesh], known_s: float) -> float | None:
        """Searches meshes of the same axes in several orders as one.

        Returns their bound if none of them has a plan below `known_s`, else None. After a first look at them, a plan that is hardly below
        it is worth a search.
        """
        cutoff, together = self.cutoff(setup.mesh, known_s), AnyOrder.of_meshes(meshes)
        looked = self._begun.pop(together, None)
        begun = looked or self._begin(replace(setup, mesh=together))
        solution = begun.solution
        if solution is None or (solution.lower_bound < cutoff and solution.lower_bound != solution.cost):
            solution = self.formulation.solve(begun.sought, cutoff)
        if not _is_beaten(solution, cutoff, known_s if looked else -math.inf):
            if len(setup.mesh.axes) < MAX_AXES:
                # Each mesh is searched from here.
                self._in_any_order = dict.fromkeys(meshes, begun._replace(solution=solution))
            return None
        if len(setup.mesh.axes) < MAX_AXES:
            self._unsolved.update(dict.fromkeys(meshes, _Unsolved(cutoff, begun)))
        return solution.lower_bound

    def bound_in_any_size(self, setup: Setup, meshes: Sequence[LogicalMesh], known_s: float) -> float | None:
        """Searches meshes of as many axes, whatever their sizes, as one for a short time.

        Returns their bound if it shows that hardly any of them has a plan below `known_s`, else None.
        """
        begun = self._begin(replace(setup, mesh=AnySizes.of_meshes(meshes)))
        enough_s = known_s * (1 - _CLOSE)
        bound = self.formulation.look(begun.sought, enough_s).lower_bound
        if bound < enough_s:
            return None
        self._unsolved.update({mesh: _Unsolved(self.cutoff(mesh, known_s)) for mesh in meshes})
        return bound

    def least_s(self, mesh: LogicalMesh) -> float:
        """Returns the seconds of all ops on a mesh that was looked at, each in its fastest state, without moves between them."""
        return sum(float(own.min()) for own in self._begun[mesh].sought.problem.costs)

    def _fastest_of_merged(self, setup: Setup, known_s: float) -> Found | Beaten | None:
        """Searches a mesh with equal axes as if these had no names; returns None if that proves nothing."""
        tables, cutoff = self._tables_on(setup), self.cutoff(setup.mesh, known_s)
        smaller = merged(tables) if len(setup.mesh.axes) == MAX_AXES else None
        if smaller is None:
            return None
        bound = self.formulation.solve(self.formulation.sought(smaller.problem), cutoff)
        if bound.lower_bound >= cutoff:
            self._unsolved[setup.mesh] = _Unsolved(cutoff)
            return Beaten(bound.lower_bound)
        kept = smaller.behind(bound.states)
        found = self.formulation.sought(tables.among(kept).problem()).solve(cutoff)
        if isinstance(found, Infeasible) or found.cost - bound.lower_bound > SAME_COST * found.cost:
            return None
        states = tuple([int(places[state]) for places, state in zip(kept, found.states, strict=True)])
        self._starts[setup.mesh] = states
        return self.formulation.plan_of(setup, tables, found._replace(states=states, lower_bound=found.cost))

    def _as_in_any_order(self, setup: Setup, alike: _Begun, known_s: float) -> Found | Beaten | None:
        """Returns the plan of several orders of a mesh's axes, if it costs as little on this one.

        It must be the cheapest, or the bound must reach the cutoff: a search of this mesh alone would end there, too. Where it reaches the
        cutoff and that plan is not below `known_s` on this mesh, the mesh is beaten.
        """
        joint, cutoff = alike.solution, self.cutoff(setup.mesh, known_s)
        if joint is None or joint.lower_bound < min(joint.cost, cutoff):
            return None
        tables, problem, states, cost = self._choice_on(setup, alike.tables, joint)
        if cost > joint.cost * (1 + SAME_COST):
            if joint.lower_bound < cutoff or cost < known_s * (1 - SAME_COST):
                return None
            self._unsolved[setup.mesh] = _Unsolved(cutoff, alike)
            return Beaten(joint.lower_bound)
        self._starts[setup.mesh] = states
        self._keep(setup.mesh, tables, problem)
        # The cost is summed in another order than the bound; a proven optimum stays proven.
        bound = cost if joint.cost == joint.lower_bound else min(cost, joint.lower_bound)
        return self.formulation.plan_of(setup, tables, joint._replace(states=states, cost=cost, lower_bound=bound))

    def _choice_on(self, setup: Setup, alike: Tables, joint: Solution) -> _Choice:
        """Returns what the choice for several orders of a mesh's axes is on this one."""
        found = self._choices.get(setup.mesh)
        if found is None:
            tables, problem = self._problem(setup)
            states = tuple([int(own[state]) for own, state in zip(resembling(alike, tables), joint.states, strict=True)])
            cost = cost_of(problem.costs, problem.edges, states) if min(states) >= 0 else math.inf
            found = self._choices[setup.mesh] = _Choice(tables, problem, states, cost)
        return found

    def cheaper_first(self, setups: Sequence[Setup]) -> list[Setup]:
        """Sorts several orders of the same axes by the costs of the choice for all of them at once, up to one where it costs no more."""
        costs = dict[LogicalMesh, float]()
        self._choices.clear()
        for setup in setups:
            alike = self._in_any_order.get(setup.mesh)
            if alike is None or alike.solution is None:
                return list(setups)
            costs[setup.mesh] = self._choice_on(setup, alike.tables, alike.solution).cost
            if costs[setup.mesh] <= alike.solution.cost * (1 + SAME_COST):
                break
        return sorted(setups, key=lambda setup: costs.get(setup.mesh, math.inf))

    def _keep(self, mesh: LogicalMesh, tables: Tables, problem: Problem) -> None:
        """Keeps the problem of a mesh whose plan may be the fastest; that of a large program's last one only, which mostly is."""
        if not self.is_small:
            self._solved.clear()
        self._solved[mesh] = tables, problem

    def _start(self, mesh: LogicalMesh, tables: Tables, problem: Problem) -> Sequence[int]:
        """Returns a choice of states on a mesh from which searches within budgets start."""
        unsolved = self._unsolved.pop(mesh, None)
        if unsolved is not None:
            self._starts[mesh] = self.formulation.solve(self._sought(tables, problem, unsolved.alike), unsolved.cutoff).states
        return self._starts.get(mesh, ())

    def within(
        self,
        budget: Budget,
        fastest: Found,
        known_s: float,
        lower_bound_s: float = 0.0,
        *,
        insists: bool = False,
        has_others: bool = False,
        is_later: bool = False,
    ) -> Found | Shortfall | Beaten:
        """Finds the cheapest plan within a budget on the mesh of `fastest`, which does not fit, if there is one below `known_s`.

        If `is_later`, the schedule's later attempts are made. For the others, see `MeshProblem`.
        """
        mesh = fastest.setup.mesh
        own = self._within(fastest, lower_bound_s)._replace(insists=insists, has_others=has_others)
        precedents = budget.options.precedents
        if not is_later:
            return budget.search_on(own, known_s) if precedents is None else self._from_precedents(precedents, budget, own, known_s)
        found = self._decided.get(mesh) or budget.search_later(own, known_s)
        if precedents is not None and isinstance(found, Shortfall):
            precedents.keep_short(own.tables, budget.memory_bytes)
        return found

    def bound_within(self, budget: Budget, fastest: Found, known_s: float, lower_bound_s: float) -> float:
        """Returns a bound of the plans within a budget on the mesh of `fastest`, after little work."""
        return max(lower_bound_s, budget.bound_at_prices(self._within(fastest, lower_bound_s), known_s))

    def _within(self, fastest: Found, lower_bound_s: float) -> MeshProblem:
        tables, problem = self._problem(fastest.setup)
        start = partial(self._start, fastest.setup.mesh, tables, problem)
        return MeshProblem(tables, problem, fastest, lower_bound_s, start)

    def _from_precedents(self, precedents: Precedents, budget: Budget, own: MeshProblem, known_s: float) -> Found | Shortfall | Beaten:
        """Makes the first attempts on a mesh from the plan of a program alike, and keeps what they find for others.

        A plan that is as near to the bound without memory as that one needs no later attempts. Only a whole search tells that bound.
        Where a program alike has no plan, this one is not searched if another mesh has one.
        """
        mesh, is_exact = own.fastest.setup.mesh, own.fastest.setup.mesh in self._solved
        self._decided.pop(mesh, None)
        if own.insists and precedents.is_short(own.tables, budget.memory_bytes):
            self._decided[mesh] = short_of(budget.fastest_peak, own.fastest, own.lower_bound_s)
            return self._decided[mesh]
        starts, gap = precedents.starts(own.tables, own.problem)
        near = gap * _AS_NEAR if is_exact else 0.0
        found = budget.search_on(own._replace(starts=starts, near=near), known_s)
        if isinstance(found, Shortfall) and not budget.schedule.later:
            precedents.keep_short(own.tables, budget.memory_bytes)
        # Plans that are tried one by one leave no states.
        if isinstance(found, Found) and mesh in budget.fitting:
            own_gap = 1 - own.lower_bound_s / found.cost_s if is_exact and found.cost_s else 0.0
            precedents.keep(own.tables, budget.fitting[mesh], own_gap)
            if own_gap <= near:
                self._decided[mesh] = found
        return found

    def _begin(self, setup: Setup, alike: _Begun | None = None) -> _Begun:
        """States the problem of a mesh; its search starts from that of `alike`, if given, which has the same axes."""
        tables, problem = self._problem(setup)
        return _Begun(tables, self._sought(tables, problem, alike))

    def _sought(self, tables: Tables, problem: Problem, alike: _Begun | None) -> Sought:
        worth = 0.0 if self.is_small else _WORTH_TIGHTENING
        if alike is None:
            return self.formulation.sought(problem, is_reused=_is_reused(tables.space.mesh), worth=worth)
        return self.formulation.sought(problem, alike.sought, resembling(tables, alike.tables), worth=worth)

    def _tables_on(self, setup: Setup) -> Tables:
        tables = self._tables.get(setup.mesh)
        if tables is None:
            tables = self.formulation.tables(setup)
            if not self.is_small:
                self._tables.clear()
            self._tables[setup.mesh] = tables
        return tables

    def _problem(self, setup: Setup) -> tuple[Tables, Problem]:
        choice = self._choices.get(setup.mesh)
        found = self._solved.get(setup.mesh) if choice is None else choice[:2]
        if found is None:
            tables = self._tables_on(setup)
            found = tables, tables.problem()
            # Several orders at once are searched for one bound, and never again.
            if self.is_small and not isinstance(setup.mesh, AnyOrder):
                self._solved[setup.mesh] = found
        return found

    def cutoff(self, mesh: LogicalMesh, known_s: float) -> float:
        """Returns the cost below which a plan on a mesh is worth the whole search."""
        is_exact = self.is_small or len(mesh.axes) == 1
        return known_s * (1 - (SAME_COST if is_exact else _WORTH))


def _is_beaten(solution: Solution, cutoff: float, known_s: float) -> bool:
    """Returns whether neither the solution nor any other is worth its place beside a plan of `known_s`."""
    return solution.lower_bound >= cutoff and solution.cost >= known_s * (1 - SAME_COST)


def _is_reused(mesh: LogicalMesh) -> bool:
    """Returns whether searches of single meshes start from that of a mesh: with three axes, its messages are too many to be worth it."""
    return isinstance(mesh, AnyOrder) and len(mesh.axes) < MAX_AXES
