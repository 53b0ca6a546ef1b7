"""dynamic_programming: the cheapest choice of a split for every op, with a proof.

With one state `x_n` per node of the network (an op's split and the treatment of its results, a slot's sharding, a use's sharding)

    minimise    sum_n weight_n seconds_n(x_n)  +  sum of weight * reshard seconds over the edges
    subject to  bytes alive at every op  <=  memory_bytes

over every legal split on every mesh that is tried. The solver minimises exactly; where it cannot prove a minimum it gives a bound.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spmdctx.cost.step import Step
from spmdctx.ir.mesh import AnyOrder, LogicalMesh
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.budget import Budget
from spmdctx.search.dynamic.effort import ENOUGH_PLAN, FAR, REPAIRED_PLAN
from spmdctx.search.dynamic.mesh_search import MeshSearch
from spmdctx.search.dynamic.results import SAME_COST, Beaten, DynamicOptions, Found, Search, Shortfall, log_mesh
from spmdctx.search.setup.blocks import joined_axes, with_blocks, without_blocks
from spmdctx.search.setup.meshes import MAX_AXES, narrow_and_even_first, orders_of, sizes_of
from spmdctx.search.setup.modes import prepare
from spmdctx.search.setup.request import Request, Setup
from spmdctx.search.solver.problem.problem import Solution
from spmdctx.wording import bytes_text, mesh_text, seconds_text
from spmdctx.wording.phases import tell

_NEAR_ENOUGH = 1 / 3
"""Share by which a plan within a budget that the user did not set must be able to improve, if it came of a search for any plan."""

_MANY_SIZES = 3
"""Sizes of axes from which orders of two axes are looked at together: most sizes are beaten, and one search shows it for both orders."""

_ALIKE = 1e-6
"""Share of a plan's seconds by which the bounds of meshes of more axes may lie below them, where the meshes that are left are looked at
together."""

_NOTHING_TO_GAIN = 1.01
"""Seconds of a plan over those of its ops alone up to which the same is tried before any mesh of more axes."""


def plan_dynamic(step: Step, request: Request, topology: Topology, options: DynamicOptions) -> Found | Shortfall:
    """Finds the cheapest assignment over all meshes that may be tried; only the user's, if the request names one."""
    return Searcher(step, topology, options).plan(request)


def mesh_is_fixed(request: Request) -> bool:
    """Returns whether the user or their strategies fix a mesh."""
    named = request.marks or request.value_pins or request.manual or isinstance(request.dataset, tuple)
    return request.mesh is not None or bool(named)


class Searcher(Search):
    """The search on one program.

    Args:
        step: the traced step.
        topology: the machine.
        options: see there.
    """

    def __init__(self, step: Step, topology: Topology, options: DynamicOptions) -> None:
        self._step, self._topology, self._options = step, topology, options
        self._meshes = MeshSearch(step, topology, options)

    def plan(self, request: Request) -> Found | Shortfall:
        """Finds the cheapest plan on any mesh that may be tried."""
        return self.budgets(request).within(self._options)

    def budgets(self, request: Request) -> Budgets:
        """Finds the cheapest plan of a request without a budget, and prepares for those within any budgets."""
        return Budgets(self._meshes, self._setups(request), is_interruptible=self._options.is_interruptible)

    def search(self, setup: Setup, known_s: float = float("inf")) -> Found | Shortfall | Beaten:
        """Finds the cheapest plan on the mesh of a set-up within the budget, if there is one below `known_s`."""
        found, formulation = self._meshes.fastest_on(setup, known_s), self._meshes.formulation
        is_likely = self._options.is_likely
        if isinstance(found, Beaten) or formulation.fits(found, self._options.memory_bytes, is_likely=is_likely):
            return found
        budget = Budget(formulation, self._options, formulation.bill_of(found))
        self._meshes.within(budget, found, known_s)
        return self._meshes.within(budget, found, known_s, is_later=True)

    def _setups(self, request: Request) -> list[Setup]:
        """Prepares a set-up for every mesh that may be tried."""
        graph = self._step.graph
        if mesh_is_fixed(request):
            return [with_blocks(graph, prepare(graph, request))]
        meshes = self._options.meshes(self._step, request.num_devices, self._topology)
        return [prepare(graph, replace(request, mesh=mesh)) for mesh in meshes]


class Budgets:
    """The cheapest plans of one request within several budgets; the work that no budget changes is done once.

    `spent` are the additions of all searches within budgets. A proof within one budget says nothing of other budgets. So a budget that an
    error names is met by a search of its own too.

    An interrupt of the keyboard ends a search that may be interrupted with the best plan so far. Where there is none, it goes on to the
    caller.
    """

    def __init__(self, meshes: MeshSearch, setups: list[Setup], *, is_interruptible: bool = False) -> None:
        self._meshes = meshes
        self._bounds: dict[LogicalMesh, float] = {}
        self._looked_s: dict[LogicalMesh, float] = {}
        self._best: Found | None = None
        self._first: Callable[[], Found] | None = None
        self._joins_sizes = False
        self._setups, self._turns = setups, [[setup] for setup in setups]
        try:
            self._turns = self._promising_first(setups)
            self._setups = [setup for turn in self._turns for setup in turn]
            self._fastest = self._fastest_of_all()
        except KeyboardInterrupt:
            self._fastest = self._at_interrupt(is_interruptible=is_interruptible)
        self._first = None
        self.spent = 0.0

    def within(self, options: DynamicOptions) -> Found | Shortfall:
        """Finds the cheapest assignment within the budget of `options`, whose limits and axes are those of the search."""
        formulation = self._meshes.formulation
        if formulation.fits(self._fastest, options.memory_bytes, is_likely=options.is_likely):
            return _as_plan(self._fastest)
        if self._fastest.is_interrupted:
            raise KeyboardInterrupt
        budget = Budget(formulation, options, formulation.bill_of(self._fastest))
        self._best = self._first = None
        try:
            found = _as_result(self._cheapest(budget))
        except KeyboardInterrupt:
            found = _as_plan(self._at_interrupt(is_interruptible=options.is_interruptible))
        self.spent += budget.spent
        return found

    def _at_interrupt(self, *, is_interruptible: bool) -> Found:
        """Returns the best plan of a search that was interrupted, with a note that says so; where there is none, interrupts again."""
        best = self._best
        if best is None and self._first is not None and is_interruptible:
            best = self._first()
        if best is None or not is_interruptible:
            raise KeyboardInterrupt from None
        note = "The search was interrupted: this is the cheapest plan that it had found. Plan again for the whole search."
        return best._replace(setup=replace(best.setup, notes=[*best.setup.notes, note]), lower_bound_s=0.0, is_interrupted=True)

    def _promising_first(self, setups: list[Setup]) -> list[list[Setup]]:
        """Sorts the set-ups by the costs that are expected on their meshes after a first, short search.

        A turn has one set-up, or those of several orders of the same axes, which are searched together before each by itself.
        """
        if len(setups) <= 2:
            return [[setup] for setup in setups]
        # A first search on three axes takes as long as all the others together, and says less.
        few = [setup for setup in setups if len(setup.mesh.axes) < MAX_AXES]
        joined = self._meshes.joins_orders and _are_many(few)
        self._joins_sizes = joined and not self._meshes.formulation.limits.restricts
        looks, turns = dict[LogicalMesh, Solution](), list[tuple[LogicalMesh, list[Setup]]]()
        for number, setup in enumerate(sorted(few, key=lambda own: narrow_and_even_first(own.mesh))):
            if any(setup in turn for _, turn in turns) or self._beaten_in_any_size(setup, few, looks):
                continue
            turn, looked = [setup], setup
            if joined and len(alike := orders_of(setup.mesh, [own.mesh for own in few])) > 1:
                turn = sorted((other for other in few if other.mesh in alike), key=lambda other: other.mesh.shape[-1])
                looked = replace(setup, mesh=AnyOrder.of_meshes([other.mesh for other in turn]))
            elif setup.mesh in self._bounds or self._beaten_together(setup, few, looks):
                continue
            tell(f"a first look at mesh {number + 1} of {len(few)}, {mesh_text(setup.mesh)}")
            looks[looked.mesh] = self._meshes.first_look(looked, min(self._looked_s.values(), default=math.inf))
            turns.append((looked.mesh, turn))
            if looked is setup:
                self._looked_s[setup.mesh] = looks[setup.mesh].cost
                if setup.mesh == _cheapest_of(looks):
                    self._first = self._meshes.first_plan(setup)
        turns.sort(key=lambda turn: _expected(looks[turn[0]]))
        seen = [turn for _, turn in turns]
        return seen + [[setup] for setup in setups if not any(setup in turn for turn in seen)]

    def _beaten_in_any_size(self, setup: Setup, few: Sequence[Setup], looks: Mapping[LogicalMesh, Solution]) -> bool:
        """Returns whether no mesh of as many axes that is left can beat one of fewer axes, which is the best so far; keeps their bound.

        This is tried until it fails, where every mesh of as many axes is beaten, or where hardly anything is left to gain.
        """
        if setup.mesh in self._bounds or not (self._joins_sizes and looks):
            return setup.mesh in self._bounds
        best, axes = _cheapest_of(looks), len(setup.mesh.axes)
        known_s, wide = looks[best].cost, {mesh: look.lower_bound for mesh, look in looks.items() if len(mesh.axes) == axes}
        seen = set(map(sizes_of, wide))
        left = [own.mesh for own in few if len(own.mesh.axes) == axes and sizes_of(own.mesh) not in seen]
        if len(best.axes) == axes or len(set(map(sizes_of, left))) < 2:
            return False
        beaten_s = min(wide.values()) / (1 - _ALIKE) if wide else self._meshes.least_s(best) * _NOTHING_TO_GAIN
        bound = self._meshes.bound_in_any_size(setup, left, known_s) if known_s <= beaten_s else None
        self._joins_sizes = bound is not None or not wide
        self._bounds.update({} if bound is None else dict.fromkeys(left, bound))
        return bound is not None

    def _beaten_together(self, setup: Setup, few: Sequence[Setup], looks: Mapping[LogicalMesh, Solution]) -> bool:
        """Returns whether no order of a mesh's axes can beat a mesh of fewer axes, which is the best so far; keeps their bound.

        This is tried only while every mesh of as many axes is beaten, or proven to be the best.
        """
        alike = orders_of(setup.mesh, [own.mesh for own in few])
        wide = [look.lower_bound for mesh, look in looks.items() if len(mesh.axes) == len(setup.mesh.axes)]
        if len(alike) < 2 or not wide or not _is_free(setup) or any(mesh in looks for mesh in alike):
            return False
        known_s = looks[_cheapest_of(looks)].cost
        if min(wide) < self._meshes.cutoff(setup.mesh, known_s):
            return False
        return self._bound_together(setup, alike, known_s) is not None

    def _fastest_of_all(self) -> Found:
        """Finds the cheapest assignment on any of the meshes, whatever memory it takes."""
        best: Found | None = None
        for number, setup in enumerate(own for turn in self._turns for own in self._bounded(turn)):
            self._looked_s.pop(setup.mesh, None)
            if setup.mesh in self._bounds:
                continue
            known_s = self._known_s()
            known = "" if best is None else f"; so far {seconds_text(best.cost_s)} a step on {mesh_text(best.setup.mesh)}"
            tell(f"mesh {number + 1} of {len(self._setups)}, {mesh_text(setup.mesh)}{known}")
            found = self._beaten_in_any_order(setup, known_s) or self._meshes.fastest_on(setup, known_s)
            self._bounds[setup.mesh] = found.lower_bound_s
            log_mesh(setup.mesh, found)
            if isinstance(found, Found) and (best is None or found.cost_s < best.cost_s * (1 - SAME_COST)):
                best = self._best = found
        assert best is not None
        return best._replace(lower_bound_s=min([best.cost_s, *self._bounds.values()]))

    def _known_s(self) -> float:
        """Returns the least cost of the plans that were found, and hardly more than that of first looks at meshes to come."""
        looked_s = min(self._looked_s.values(), default=math.inf) * (1 + 4 * SAME_COST)
        return looked_s if self._best is None else min(looked_s, self._best.cost_s)

    def _bounded(self, turn: list[Setup]) -> list[Setup]:
        """Bounds the meshes of a turn together, and returns them in the order in which they are searched."""
        if len(turn) == 1:
            return turn
        bound = self._bound_together(turn[0], [own.mesh for own in turn], self._known_s())
        return turn if bound is not None else self._meshes.cheaper_first(turn)

    def _beaten_in_any_order(self, setup: Setup, known_s: float) -> Beaten | None:
        """Bounds the meshes of three axes of the same sizes together, before the first of them is searched."""
        alike = orders_of(setup.mesh, [own.mesh for own in self._setups])
        is_first = alike[0] == setup.mesh and len(alike) > 1
        if len(setup.mesh.axes) < MAX_AXES or not is_first or not _is_free(setup) or math.isinf(known_s):
            return None
        bound = self._bound_together(setup, alike, known_s)
        return None if bound is None else Beaten(bound)

    def _bound_together(self, setup: Setup, alike: Sequence[LogicalMesh], known_s: float) -> float | None:
        """Keeps and returns the bound of meshes with the same axes in several orders, if none of them has a plan below `known_s`."""
        bound = self._meshes.bound_in_any_order(setup, alike, known_s)
        if bound is not None:
            self._bounds.update(dict.fromkeys(alike, bound))
        return bound

    def _cheapest(self, budget: Budget) -> Found | Shortfall:
        """Finds the cheapest assignment on any of the meshes whose peak is in the budget.

        The fastest plan's peak is not.
        """
        fastest, bounds = self._fastest, dict(self._bounds)
        # The most promising mesh comes first, so that most others need no search.
        setups = sorted(self._setups, key=lambda setup: (setup.mesh != fastest.setup.mesh, bounds[setup.mesh]))
        best, seen = self._repaired(budget, setups, bounds) if budget.schedule.repairs else (None, {})
        short = seen
        if best is None or not budget.schedule.stops_at_first:
            setups.sort(key=lambda setup: budget.costs_s.get(setup.mesh, math.inf))
            proven = {mesh: one for mesh, one in seen.items() if one.is_proven}
            best, short = self._pass(budget, [setup for setup in setups if setup.mesh not in proven], bounds, best)
            short |= proven
        is_cut = any(one.is_cut for one in short.values())
        if best is None and is_cut and budget.schedule != ENOUGH_PLAN:
            # An error names a budget that this short search meets. Its plan may be poor, so more searches start from it.
            own = budget.schedule
            budget.begin(ENOUGH_PLAN)
            # From the bounds that are known here it would take another way.
            first = dict(self._bounds)
            best, _ = self._pass(budget, setups, first, None)
            bounds = {mesh: max(bound, first[mesh]) for mesh, bound in bounds.items()}
            budget.begin(own._replace(enough=_NEAR_ENOUGH) if budget.options.is_soft else own)
        if best is not None and not budget.schedule.stops_at_first:
            # Meshes that were given up while no plan was in sight may have a cheaper one.
            given_up = [setup for setup in setups if setup.mesh in short and short[setup.mesh].is_cut]
            best, _ = self._pass(budget, given_up, bounds, best)
        if best is not None:
            return best._replace(lower_bound_s=min([best.cost_s, *bounds.values()]))
        joined = next(filter(None, (joined_axes(setup.mesh) for setup in setups)), "")
        is_proven = not joined and all(one.is_proven for one in short.values())
        ends = list(short.values())
        if not is_proven:
            ends += seen.values()
        least = min(ends, key=lambda one: one.enough_bytes)
        return least._replace(fastest=fastest, is_proven=is_proven, is_cut=is_cut, joined=joined)

    def _repaired(
        self, budget: Budget, setups: Sequence[Setup], bounds: dict[LogicalMesh, float]
    ) -> tuple[Found | None, dict[LogicalMesh, Shortfall]]:
        """Searches all meshes by repairs alone, those of fewest axes first, as they take the least work."""
        schedule = budget.schedule
        budget.begin(REPAIRED_PLAN._replace(stops_at_first=schedule.stops_at_first, hopeless=schedule.repairs))
        found = self._pass(budget, sorted(setups, key=lambda setup: len(setup.mesh.axes)), bounds, None)
        budget.begin(schedule)
        return found

    def _pass(
        self, budget: Budget, setups: Sequence[Setup], bounds: dict[LogicalMesh, float], best: Found | None
    ) -> tuple[Found | None, dict[LogicalMesh, Shortfall]]:
        """Searches meshes for a plan cheaper than `best`, and raises their bounds.

        Returns the best plan, and the meshes on which none was found while there was none of another.
        """
        schedule, short, begun = budget.schedule, dict[LogicalMesh, Shortfall](), list[Setup]()
        has_others = len(setups) > 1 and bool(schedule.later)

        def search(setup: Setup, best: Found | None, *, is_later: bool) -> Found | None:
            mesh = setup.mesh
            known_s = float("inf") if best is None else best.cost_s / (1 + schedule.enough)
            if best is not None and (schedule.stops_at_first or bounds[mesh] >= known_s):
                return best
            begun.append(setup)
            tell(f"{mesh_text(mesh)} within {bytes_text(budget.options.memory_bytes or 0)} per device")
            # A later attempt knows what it found before.
            known_s = float("inf") if is_later and best is not None and best.setup.mesh == mesh else known_s
            fastest = self._fastest._replace(setup=setup)
            how = {"insists": best is not None, "has_others": has_others and not is_later, "is_later": is_later}
            found = self._meshes.within(budget, fastest, known_s, bounds[mesh], **how)
            bounds[mesh] = max(bounds[mesh], found.lower_bound_s)
            log_mesh(mesh, found, budget.options.memory_bytes)
            known = short.pop(mesh, None)
            if isinstance(found, Shortfall) and (best is None or found is known):
                short[mesh] = found
            elif isinstance(found, Found) and (best is None or found.cost_s < best.cost_s * (1 - SAME_COST)):
                self._best = found
                return found
            return best

        left, is_known = list(setups), best is not None
        while left:
            best = search(left.pop(0), best, is_later=False)
            if best is not None and not (is_known or self._meshes.is_small or schedule.stops_at_first):
                left, is_known = self._priced_first(budget, left, bounds, best), True
        for setup in sorted(begun, key=lambda own: budget.costs_s.get(own.mesh, math.inf)) if schedule.later else ():
            best = search(setup, best, is_later=True)
        return best, short

    def _priced_first(self, budget: Budget, left: list[Setup], bounds: dict[LogicalMesh, float], best: Found) -> list[Setup]:
        """Bounds meshes at the prices of memory of the first plan, which is far from what they may have, and sorts them by these bounds."""
        known_s = best.cost_s / (1 + budget.schedule.enough)
        worth = [setup for setup in left if bounds[setup.mesh] < known_s]
        if len(worth) > 1 and budget.prices and best.cost_s > min(bounds[own.mesh] for own in worth) * (1 + FAR):
            for setup in worth:
                mesh = setup.mesh
                bounds[mesh] = self._meshes.bound_within(budget, self._fastest._replace(setup=setup), known_s, bounds[mesh])
            left.sort(key=lambda own: bounds[own.mesh])
        return left


def _expected(look: Solution) -> float:
    """Returns the logarithm of the cost that a first look promises; equal up to a millionth, lest names of meshes decide.

    The bound comes near the least cost sooner than the look's plan does, so it alone counts.
    """
    return round(math.log(max(look.lower_bound, sys.float_info.min)), 6)


def _cheapest_of(looks: Mapping[LogicalMesh, Solution]) -> LogicalMesh:
    """Returns the mesh whose first look found the least cost; the first of equals."""
    return min(looks, key=lambda mesh: looks[mesh].cost)


def _are_many(setups: Sequence[Setup]) -> bool:
    """Returns whether there are meshes of many sizes of several axes, on which nothing is pinned or coupled."""
    sizes = {sizes_of(setup.mesh) for setup in setups if len(setup.mesh.axes) > 1}
    return len(sizes) >= _MANY_SIZES and all(_is_free(setup) and not setup.couplings for setup in setups)


def _is_free(setup: Setup) -> bool:
    """Returns whether nothing is pinned, so that a set-up says the same on a mesh with its axes in another order."""
    return not (setup.pins or setup.partial_pins or setup.forced)


def _as_result(found: Found | Shortfall) -> Found | Shortfall:
    """Returns a result as callers get it: its plan has notes of its own, and the mesh as it was before axes were joined."""
    return found._replace(fastest=_as_plan(found.fastest)) if isinstance(found, Shortfall) else _as_plan(found)


def _as_plan(found: Found) -> Found:
    return found._replace(setup=without_blocks(replace(found.setup, notes=list(found.setup.notes))))
