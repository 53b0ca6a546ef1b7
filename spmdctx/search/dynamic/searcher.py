"""dynamic_programming: the cheapest choice of a split for every op, with a proof.

With one state `x_n` per node of the network (an op's split and what becomes of its results, a slot's sharding, a use's sharding)

    minimise    sum_n weight_n seconds_n(x_n)  +  sum of weight * reshard seconds over the edges
    subject to  bytes alive at every op  <=  memory_bytes

over every legal split on every mesh that is tried. The solver minimises exactly; what it cannot prove it bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from spmdctx.cost.memory.lives import Peak, StepMemory, step_memory
from spmdctx.cost.step import Step, bill_of
from spmdctx.errors import StrategyError
from spmdctx.ir.mesh import AnyOrder, LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.branching import Best, cheapest_accepted
from spmdctx.search.dynamic.effort import ANY, HASTY, PROVEN, QUICK, SOFT, THOROUGH, Pace
from spmdctx.search.dynamic.free_values import place_free_values
from spmdctx.search.dynamic.results import Beaten, DynamicOptions, Found, Shortfall, is_small
from spmdctx.search.dynamic.stored_inputs import enter_as_stored, store_as_read
from spmdctx.search.problem.fold import ROUNDS
from spmdctx.search.problem.memory_rows import Passing, completed, counted_bytes, least_peak, on_chip, op_at, passing_at, with_memory
from spmdctx.search.problem.network import Network, build_network
from spmdctx.search.problem.space import Space
from spmdctx.search.problem.tables import Tables
from spmdctx.search.setup.meshes import MAX_AXES
from spmdctx.search.setup.modes import prepare
from spmdctx.search.setup.request import Request, Setup
from spmdctx.search.solver.problem.problem import Infeasible, Known, Problem, Solution
from spmdctx.search.solver.solve import Sought, may_be_proven, solve

MODE = "dynamic_programming"

_EQUAL = 5e-10

_LEAST_S = 1e-300
"""Instead of a cost of nothing, of which no share can be told."""

_WORTH_THREE = 1e-3
"""Share of its seconds by which a mesh of three axes must be able to improve a large program's plan."""

_LAST_EFFORT = 5

_LIMIT_SPACING = 0.005
"""Share of the budget by which the limits that are tried for a program that is not small differ at least."""

_LARGE_PROGRAM = 5000
"""Ops from which a budget that nobody set is given up where a hasty search finds no plan."""


class _Glance(NamedTuple):
    """What a first, short search on a mesh found."""

    tables: Tables
    sought: Sought
    solution: Solution


class _Solved(NamedTuple):
    """A mesh's problem without memory, which has been solved."""

    tables: Tables
    problem: Problem


def plan_dynamic(step: Step, request: Request, topology: Topology, options: DynamicOptions) -> Found | Shortfall:
    """The cheapest assignment over all meshes that may be tried, which are the user's where he or his strategies name one."""
    return Searches(step, request, topology, options).within(options)


class Searches:
    """Searches for one step that differ in their budget alone; what no budget changes is done once."""

    def __init__(self, step: Step, request: Request, topology: Topology, options: DynamicOptions) -> None:
        self._searcher = Searcher(step, topology, options)
        self._setups = self._searcher.promising_first(_setups(step, request, topology, options))
        self._fastest = self._searcher.fastest(self._setups)

    def within(self, options: DynamicOptions) -> Found | Shortfall:
        """The cheapest assignment within the budget of `options`, whose limits and axes are those of the first ones."""
        searcher = self._searcher.with_options(options)
        return self._fastest if searcher.fits(self._fastest) else searcher.fastest_within(self._setups, self._fastest)


def _setups(step: Step, request: Request, topology: Topology, options: DynamicOptions) -> list[Setup]:
    """A set-up for every mesh that may be tried."""
    if mesh_is_fixed(request):
        return [prepare(step.graph, request)]
    meshes = options.meshes(step, request.num_devices, topology)
    return [prepare(step.graph, replace(request, mesh=mesh)) for mesh in meshes]


def lower_bound_s(step: Step, request: Request, topology: Topology, options: DynamicOptions, mesh: LogicalMesh) -> float:
    """What no assignment goes below, on the meshes that the search would try or on `mesh`; memory plays no part."""
    searcher = Searcher(step, topology, replace(options, memory_bytes=None))
    meshes = [mesh]
    if not mesh_is_fixed(request):
        meshes += [other for other in options.meshes(step, request.num_devices, topology) if other != mesh]
    lowest = float("inf")
    for other in meshes:
        found = searcher.search(prepare(step.graph, replace(request, mesh=other)), lowest)
        assert not isinstance(found, Shortfall)
        lowest = min(lowest, found.lower_bound_s)
    return lowest


def mesh_is_fixed(request: Request) -> bool:
    """Whether the user or his strategies name a mesh."""
    named = request.marks or request.value_pins or request.manual or isinstance(request.dataset, tuple)
    return request.mesh is not None or bool(named)


class Searcher:
    """Searches one mesh after the other; the network is built once for each pattern of pins."""

    _fold_rounds = ROUNDS

    def __init__(self, step: Step, topology: Topology, options: DynamicOptions) -> None:
        self._step, self._topology, self._options = step, topology, options
        self._space: Space | None = None
        self._memory: StepMemory | None = None
        self._networks: dict[object, Network] = {}
        self._glances: dict[LogicalMesh, _Glance] = {}
        self._bounds: dict[LogicalMesh, float] = {}
        self._solved: dict[LogicalMesh, _Solved] = {}
        self._starts: dict[LogicalMesh, Sequence[int]] = {}
        self._fitting: dict[LogicalMesh, Sequence[int]] = {}
        self._free_peak = Peak(0, 0)

    def with_options(self, options: DynamicOptions) -> Searcher:
        """The same searcher for another budget.

        What is proven within one says nothing of others, and a budget that an error names is met by a search that knows no other.
        """
        other = copy(self)
        other._options, other._bounds, other._fitting = options, dict(self._bounds), {}
        return other

    def promising_first(self, setups: list[Setup]) -> list[Setup]:
        """The set-ups by what a first, short search finds on their meshes."""
        if len(setups) <= 2:
            return setups
        # A glance at three axes takes as long as all of the others, and says less.
        few = [setup for setup in setups if len(setup.mesh.axes) < MAX_AXES]
        for setup in few:
            tables = self._tables(setup)
            sought = self._sought(tables)
            self._glances[setup.mesh] = _Glance(tables, sought, self._solve(sought, float("-inf")))
        few.sort(key=lambda setup: self._glances[setup.mesh].solution.cost)
        return few + [setup for setup in setups if len(setup.mesh.axes) >= MAX_AXES]

    def fastest(self, setups: list[Setup]) -> Found:
        """The cheapest assignment on any of the meshes, whatever memory it takes."""
        best: Found | None = None
        for setup in setups:
            if setup.mesh in self._bounds:
                continue
            known_s = float("inf") if best is None else best.cost_s
            found = self._beaten_in_any_order(setup, setups, known_s) or self._fastest_on(setup, known_s)
            self._bounds[setup.mesh] = found.lower_bound_s
            if isinstance(found, Found) and (best is None or found.cost_s < best.cost_s * (1 - _EQUAL)):
                best = found
        assert best is not None
        return best._replace(lower_bound_s=min([best.cost_s, *self._bounds.values()]))

    def _beaten_in_any_order(self, setup: Setup, setups: list[Setup], known_s: float) -> Beaten | None:
        """Tries the meshes of three axes of the same sizes as one, before the first of them."""
        sizes = sorted(setup.mesh.shape)
        alike = [other.mesh for other in setups if sorted(other.mesh.shape) == sizes]
        is_free = not (setup.pins or setup.partial_pins or setup.forced)
        if len(sizes) < MAX_AXES or len(alike) < 2 or alike[0] != setup.mesh or not is_free or math.isinf(known_s):
            return None
        tables = self._tables(replace(setup, mesh=AnyOrder.of_meshes(alike)))
        cutoff = known_s * (1 - self._margin(setup.mesh))
        bound = self._solve(self._sought(tables), cutoff).lower_bound
        if bound < cutoff:
            return None
        self._bounds.update(dict.fromkeys(alike, bound))
        return Beaten(bound)

    def fits(self, found: Found) -> bool:
        """Whether an assignment's peak is in the budget."""
        return self._options.memory_bytes is None or self._peak(found).bytes <= self._options.memory_bytes

    def fastest_within(self, setups: list[Setup], fastest: Found) -> Found | Shortfall:
        """The cheapest assignment on any of the meshes whose peak is in the budget, which that of the fastest one is not."""
        pace, self._free_peak = self._pace(), self._peak(fastest)
        best: Found | None = None
        least: Shortfall | None = None
        is_proven = True
        # The most promising first, so that most of the others need no look.
        for setup in sorted(setups, key=lambda setup: (setup.mesh != fastest.setup.mesh, self._bounds[setup.mesh])):
            known_s = float("inf") if best is None else best.cost_s * (1 - pace.enough)
            if best is not None and (pace.stops_at_first or self._bounds[setup.mesh] >= known_s):
                continue
            found = self._in_budget(*self._problem_on(setup), fastest._replace(setup=setup), known_s)
            self._bounds[setup.mesh] = max(self._bounds[setup.mesh], found.lower_bound_s)
            if isinstance(found, Shortfall):
                is_proven &= found.is_proven
                least = found._replace(fastest=fastest) if least is None or found.enough_bytes < least.enough_bytes else least
            elif isinstance(found, Found) and (best is None or found.cost_s < best.cost_s * (1 - _EQUAL)):
                best = found
        if best is not None:
            return best._replace(lower_bound_s=min([best.cost_s, *self._bounds.values()]))
        assert least is not None
        return least._replace(is_proven=is_proven)

    def _pace(self) -> Pace:
        """How much the budget is worth."""
        any_will_do, is_soft = self._options.wants_any, self._options.is_soft
        if is_small(self._step):
            return ANY if any_will_do else SOFT if is_soft else PROVEN
        quick = QUICK._replace(gives_up=len(self._step.graph.ops) >= _LARGE_PROGRAM)
        return HASTY if any_will_do else quick if is_soft else THOROUGH

    def search(self, setup: Setup, known_s: float = float("inf")) -> Found | Shortfall | Beaten:
        """The cheapest assignment on the mesh of a set-up within the budget, if there is one below `known_s`."""
        found = self._fastest_on(setup, known_s)
        if isinstance(found, Beaten) or self.fits(found):
            return found
        self._free_peak = self._peak(found)
        return self._in_budget(*self._problem_on(setup), found, known_s)

    def _problem_on(self, setup: Setup) -> tuple[Tables, Problem]:
        """The tables of a mesh and their problem, which that of the fastest plan has already."""
        solved = self._solved.get(setup.mesh)
        if solved is not None:
            return solved.tables, solved.problem
        tables = self._tables(setup)
        return tables, tables.problem()

    def _fastest_on(self, setup: Setup, known_s: float) -> Found | Beaten:
        cutoff = known_s * (1 - self._margin(setup.mesh))
        glance = self._glances.pop(setup.mesh, None)
        if glance is not None:
            self._starts[setup.mesh] = glance.solution.states
        if glance is not None and glance.solution.lower_bound >= cutoff:
            return Beaten(glance.solution.lower_bound)
        tables = self._tables(setup) if glance is None else glance.tables
        is_proven = glance is not None and glance.solution.lower_bound == glance.solution.cost
        sought = self._sought(tables) if glance is None else glance.sought
        solution = glance.solution if glance is not None and is_proven else self._solve(sought, cutoff)
        self._starts[setup.mesh] = solution.states
        if solution.lower_bound >= cutoff and solution.cost >= known_s * (1 - _EQUAL):
            return Beaten(solution.lower_bound)
        # Of one mesh, most often the best one, which is the last that is not beaten.
        self._solved = {setup.mesh: _Solved(tables, sought.problem)}
        return self._found(setup, tables, solution)

    def _margin(self, mesh: LogicalMesh) -> float:
        """The share by which a mesh must be better than others to be worth the whole search."""
        return _WORTH_THREE if len(mesh.axes) >= MAX_AXES and not is_small(self._step) else _EQUAL

    def _sought(self, tables: Tables) -> Sought:
        return Sought(tables.problem(), tolerance=self._options.limits.tolerance)

    def _solve(self, sought: Sought, cutoff: float) -> Solution:
        solution = sought.solve(cutoff)
        if isinstance(solution, Infeasible):
            # Everything whole is always possible; only pins and limits of the search can make that hard to see.
            solution = solve(sought.problem, effort=_LAST_EFFORT, tolerance=self._options.limits.tolerance)
        if isinstance(solution, Infeasible):
            raise StrategyError("The search found no way to keep all pins and algo parameters.", fix="leave some of them out")
        return solution

    def _tables(self, setup: Setup) -> Tables:
        if self._space is None:
            self._space = Space(self._step.graph, setup.mesh, self._topology, self._step.loose)
        space = self._space.on(setup.mesh)
        return Tables(self._network(space, setup), space, setup, self._options.limits)

    def _network(self, space: Space, setup: Setup) -> Network:
        pins: dict[int, object] = {space.slot_of[value]: dims for value, dims in setup.partial_pins.items()}
        pins.update({space.slot_of[value]: sharding for value, sharding in setup.pins.items()})
        marks = _numbered(pins)
        key = (tuple(sorted(marks.items())), tuple(sorted(setup.forced)))
        known = self._networks.get(key)
        if known is None:
            known = self._networks[key] = build_network(space, self._step.scopes, marks, setup.forced, self._fold_rounds)
        return known

    def _found(self, setup: Setup, tables: Tables, solution: Solution) -> Found:
        states = solution.states[: len(tables.choices)]
        space, chosen = tables.space, tables.assignment(states, MODE)
        entered = enter_as_stored(space, chosen)
        ways = [entered] if entered is chosen else [entered, chosen]
        placed = [place_free_values(space, store_as_read(space, way, tables.pins), tables.pins) for way in ways]
        assignment = placed[0] if len(placed) == 1 else min(placed, key=partial(self._price_s, mesh=setup.mesh))
        # The batch lies as the plan has it; nobody asked for anything else.
        asked = {value: sharding for value, sharding in setup.seeds.items() if value in setup.partial_pins}
        return Found(replace(setup, seeds=asked), assignment, solution.cost, solution.lower_bound, solution.counts)

    def _price_s(self, assignment: Assignment, mesh: LogicalMesh) -> float:
        bill = bill_of(self._step, assignment, mesh, self._topology)
        return bill.compute_s + bill.exposed_communication_s

    def _in_budget(self, tables: Tables, problem: Problem, fastest: Found, known_s: float) -> Found | Shortfall | Beaten:
        """The cheapest assignment whose peak is in the budget, which that of the fastest one is not, if it can be below `known_s`.

        What a short search finds is found by the long one: an error names budgets and device counts by short ones.
        """
        pace = self._pace()
        if not pace.hasty_rounds:
            return self._within(tables, problem, fastest, known_s, pace)
        # Where a plan is known, a mesh is looked at for whether it has a cheaper one.
        tolerance = HASTY.tolerance if math.isinf(known_s) else pace.tolerance
        hasty = HASTY._replace(rounds=pace.hasty_rounds, tolerance=tolerance)
        first = self._within(tables, problem, fastest, known_s, hasty)
        if isinstance(first, Beaten) or (isinstance(first, Shortfall) and (first.is_proven or pace.gives_up)):
            return first
        if isinstance(first, Shortfall):
            return self._within(tables, problem, fastest, known_s, pace)
        if min(first.cost_s, known_s) <= first.lower_bound_s * (1 + pace.enough):
            return first
        best = self._within(tables, problem, fastest, min(known_s, first.cost_s), pace)
        if isinstance(best, Found) and best.cost_s <= first.cost_s:
            return best
        bound_s = max(first.lower_bound_s, best.lower_bound_s)
        return Beaten(bound_s) if bound_s >= known_s else first._replace(lower_bound_s=min(bound_s, first.cost_s))

    def _within(self, tables: Tables, problem: Problem, fastest: Found, known_s: float, pace: Pace) -> Found | Shortfall | Beaten:
        """The same by searches of one pace.

        The solver counts what is stored, what uses gather, and what the ops copy for themselves that run at the peak of a plan
        that does not fit. What else is alive there (values that are free to place, results on their way) is taken from the limit.
        The fastest plan, one that fits, and the last solution are where the next search starts.
        """
        budget, memory = self._options.memory_bytes or 0, self._step_memory()
        tolerance = max(self._options.limits.tolerance, pace.tolerance)
        limit = high = full = float(budget + on_chip(self._topology).total_bytes)
        low, nearest = 0.0, Peak(0, 0)
        spacing = 0.0 if is_small(self._step) else _LIMIT_SPACING * full
        # Nothing that fits is cheaper than what need not.
        mesh = fastest.setup.mesh
        bound_s = self._bounds.get(mesh, 0.0)
        starts = [known[mesh] for known in (self._starts, self._fitting) if mesh in known]
        last: list[Sequence[int]] = []
        counted: dict[Passing, None] = {}
        seen: Found | None = None
        effort, solver = pace.effort, partial(solve, tolerance=tolerance, cutoff=known_s)
        for _ in range(pace.rounds):
            limited = with_memory(tables, problem, memory, limit, counted, only_stored=pace.only_stored)
            known = _known(limited, starts + last, bound_s)
            solution = self._limited(limited, budget - limit, fastest, partial(solver, effort=effort, known=known))
            if isinstance(solution, Shortfall) and limit == full and seen is None:
                return solution._replace(lower_bound_s=max(solution.lower_bound_s, bound_s))
            if isinstance(solution, Shortfall) or (limit < full and solution.lower_bound >= known_s):
                # Too much was taken off for the copies of a plan that makes many; at most, what leaves the least that can be met.
                low = max(limit, solution.enough_bytes - (budget - limit)) if isinstance(solution, Shortfall) else limit
                if high - low <= spacing:
                    break
                limit = (low + high) / 2
                continue
            if limit == full:
                bound_s = max(bound_s, solution.lower_bound)
            if bound_s >= known_s:
                return Beaten(bound_s)
            last = [solution.states[: len(tables.choices)]]
            found = self._found(fastest.setup, tables, solution)._replace(lower_bound_s=bound_s)
            peak = self._peak(found)
            if peak.bytes > budget:
                nearest = peak if not nearest.bytes or peak.bytes < nearest.bytes else nearest
                more = dict.fromkeys(passing_at(tables.network, memory, peak.time))
                if pace.counts_copies and not counted.keys() >= more.keys():
                    counted |= more
                    continue
            is_proven = solution.cost - solution.lower_bound <= max(tolerance, _EQUAL) * solution.cost
            if pace.proves and effort == pace.effort and not is_proven and may_be_proven(solution, effort + 1):
                # The last of these problems is the first that is worth a proof.
                effort += 1
                continue
            if peak.bytes <= budget:
                if seen is None or found.cost_s <= seen.cost_s:
                    seen, self._fitting[mesh] = found, last[0]
                if effort > pace.effort or seen.cost_s - bound_s <= pace.insists * max(seen.cost_s, _LEAST_S):
                    return seen._replace(lower_bound_s=bound_s)
                effort += 1
                continue
            if seen is not None and effort > pace.effort:
                return seen._replace(lower_bound_s=bound_s)
            if limit == full and pace.branches:
                best = self._branched(limited, solution, tables, fastest, pace, tolerance)
                if not best.is_cut:
                    return _short_of(nearest, fastest, bound_s) if best.found is None else best.found
                seen, bound_s = best.found, max(bound_s, best.lower_bound)
            high = counted_bytes(limited, solution.states)
            if high - low <= spacing:
                break
            limit = min(limit - spacing, budget - (peak.bytes - high))
            limit = limit if limit > low else (low + high) / 2
        if seen is None and pace.proves:
            # What is found without proofs, of which an error names the budget.
            return self._within(tables, problem, fastest, known_s, ANY)
        return _short_of(nearest, fastest, bound_s) if seen is None else seen

    def _step_memory(self) -> StepMemory:
        """When the step's values are in memory."""
        if self._memory is None:
            step, fuses = self._step, self._topology.compiler.fuses_into_products
            self._memory = step_memory(step.graph, step.scopes, step.donated, fuses_into_products=fuses)
        return self._memory

    def _branched(self, limited: Problem, first: Solution, tables: Tables, fastest: Found, pace: Pace, tolerance: float) -> Best[Found]:
        """The cheapest assignment whose peak is in the budget, among those whose counted peak is."""

        def accept(solution: Solution) -> Found | None:
            found = self._found(fastest.setup, tables, solution)
            return found if self.fits(found) else None

        solver = partial(solve, tolerance=tolerance)
        best = cheapest_accepted(tables, limited, first, solver, accept, work=pace.work, tolerance=tolerance)
        return best if best.found is None else best._replace(found=best.found._replace(lower_bound_s=best.lower_bound))

    def _limited(
        self, limited: Problem, spare: float, fastest: Found, solver: Callable[[Problem], Solution | Infeasible]
    ) -> Solution | Shortfall:
        """The best choice of states in the problem's budget, which is by `spare` smaller than the user's."""
        assert limited.memory is not None
        least, memory = least_peak(limited), self._step_memory()
        if least.bytes > limited.memory.limit:
            alive = int(least.bytes + spare)
            return Shortfall(op_at(memory, least.time), alive, alive, fastest, is_proven=True, lower_bound_s=math.inf)
        solution = solver(limited)
        if isinstance(solution, Solution):
            return solution
        bound_s = 0.0 if solution.is_proven else solution.lower_bound
        if math.isinf(solution.smallest_limit):
            # Nothing is known to be enough but what the fastest plan takes.
            return _short_of(self._free_peak, fastest, bound_s)
        alive, enough = int(solution.least_usage + spare), int(solution.smallest_limit + spare)
        return Shortfall(op_at(memory, solution.time), alive, enough, fastest, lower_bound_s=bound_s)

    def _peak(self, found: Found) -> Peak:
        """The op at which most bytes are alive, copies and all."""
        bill = bill_of(self._step, found.assignment, found.setup.mesh, self._topology)
        return Peak(bill.memory_profile.index(bill.memory_bytes), bill.memory_bytes)


def _known(limited: Problem, starts: Sequence[Sequence[int]], bound_s: float) -> Known | None:
    """Where a search starts; nowhere, if nothing is known."""
    return Known(tuple(completed(limited, states) for states in starts), bound_s) if starts else None


def _short_of(nearest: Peak, fastest: Found, bound_s: float) -> Shortfall:
    """No plan was found; the nearest had this peak."""
    return Shortfall(nearest.time, nearest.bytes, nearest.bytes, fastest, lower_bound_s=bound_s)


def _numbered(pins: Mapping[int, object]) -> dict[int, int]:
    """Equal pins by equal numbers from 1 on."""
    numbers: dict[object, int] = {}
    return {slot: numbers.setdefault(sharding, len(numbers) + 1) for slot, sharding in pins.items()}
