"""One step stated as a problem for the solver, mesh by mesh, and the plans read from its solutions; all searches with states share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Generic, NamedTuple, TypeVar

from spmdctx.cost.bill import Bill
from spmdctx.cost.memory.lives import Peak, StepMemory, compiled_memory
from spmdctx.cost.step import Step, bill_of
from spmdctx.errors import StrategyError
from spmdctx.ir.arrays import IntArray
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.plans.free_values import place_free_values
from spmdctx.search.dynamic.plans.stored_inputs import enter_as_stored, only_free_enter, store_as_read
from spmdctx.search.dynamic.results import Found
from spmdctx.search.problem.fold import FOLDING, Folding
from spmdctx.search.problem.network import Network, build_network
from spmdctx.search.problem.space import Space
from spmdctx.search.problem.tables import Tables
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.request import Setup
from spmdctx.search.solver.problem.problem import Infeasible, Problem, Solution
from spmdctx.search.solver.solve import Sought, solve

_LAST_EFFORT = 5

TablesT = TypeVar("TablesT", bound=Tables, covariant=True)


class MeshProblem(NamedTuple):
    """A mesh whose fastest plan does not fit in the budget.

    Attributes:
        tables: the tables of the mesh.
        problem: the problem to minimise, without memory.
        fastest: the fastest plan on any mesh, with the set-up of this one.
        lower_bound_s: no plan on the mesh costs less, whatever memory it takes.
        start: returns the choice of states from which a search starts; empty if there is none.
        starts, near: other such choices, and the gap, relative to the cost, at which a first plan is near enough beside them.
        insists: whether the search goes on while no plan is in sight.
        has_others: whether other meshes are searched before this one is searched again.
    """

    tables: Tables
    problem: Problem
    fastest: Found
    lower_bound_s: float = 0.0
    start: Callable[[], Sequence[int]] = tuple
    starts: tuple[Sequence[int], ...] = ()
    near: float = 0.0
    insists: bool = False
    has_others: bool = False


class Formulation(Generic[TablesT]):
    """States the problem of one step on any mesh. The network is built once for each pattern of pins.

    Args:
        step: the traced step.
        topology: the machine.
        limits: parameters of the search.
        tables: makes the tables of a mesh, which hold the choices that the mode searches.
        mode: name of the search mode, which the assignments bear.
        folding: which ops are decided together.
    """

    def __init__(
        self,
        step: Step,
        topology: Topology,
        limits: AlgoLimits,
        tables: Callable[[Network, Space, Setup, AlgoLimits], TablesT],
        *,
        mode: str,
        folding: Folding = FOLDING,
    ) -> None:
        self.step, self.topology, self.limits, self.mode = step, topology, limits, mode
        self._make_tables, self._folding = tables, folding
        self._space: Space | None = None
        self._networks: dict[object, Network] = {}

    @cached_property
    def memory(self) -> StepMemory:
        """The times at which the step's values are in memory."""
        step = self.step
        compiler = self.topology.compiler
        # Of a pass of micro-batches the bill counts less if nothing is moved; rows are its lower bound.
        return compiled_memory(step.graph, step.scopes, step.donated, compiler, is_split=not step.graph.accumulators)

    def space_on(self, mesh: LogicalMesh) -> Space:
        """Returns the step's space on a mesh."""
        if self._space is None:
            self._space = Space(self.step.graph, mesh, self.topology, self.step.from_literals)
        return self._space if self._space.mesh == mesh else self._space.on(mesh)

    def network(self, space: Space, setup: Setup) -> Network:
        """Returns the network for the pins of a set-up."""
        pins: dict[int, object] = {space.slot_of[value]: dims for value, dims in setup.partial_pins.items()}
        pins.update({space.slot_of[value]: sharding for value, sharding in setup.pins.items()})
        marks = _numbered(pins)
        key = (tuple(sorted(marks.items())), tuple(sorted(setup.forced)))
        known = self._networks.get(key)
        if known is None:
            known = self._networks[key] = build_network(space, self.step.scopes, marks, setup.forced, self._folding)
        return known

    def tables(self, setup: Setup) -> TablesT:
        """Makes the tables of a set-up's mesh."""
        space = self.space_on(setup.mesh)
        return self._make_tables(self.network(space, setup), space, setup, self.limits)

    def sought(
        self, problem: Problem, alike: Sought | None = None, places: Sequence[IntArray] = (), *, is_reused: bool = False, worth: float = 0.0
    ) -> Sought:
        """Returns the search of a problem without memory, which may be solved in several steps; see `Sought` for the others."""
        return Sought(problem, tolerance=self.limits.tolerance, alike=alike, places=places, is_reused=is_reused, worth=worth)

    def solve(self, sought: Sought, cutoff: float) -> Solution:
        """Solves a problem without memory, as far as its solutions may cost less than the cutoff.

        Raises:
            StrategyError: no choice keeps all pins and parameters of the search.
        """
        return self._solution(sought, sought.solve(cutoff))

    def look(self, sought: Sought, known_s: float) -> Solution:
        """Searches a problem without memory for a short time, knowing a plan of `known_s`; raises like `solve`."""
        return self._solution(sought, sought.look(known_s))

    def _solution(self, sought: Sought, solution: Solution | Infeasible) -> Solution:
        if isinstance(solution, Infeasible):
            # Keeping everything whole is always possible. Only pins and limits of the search can hide that.
            solution = solve(sought.problem, effort=_LAST_EFFORT, tolerance=self.limits.tolerance)
        if isinstance(solution, Infeasible):
            raise StrategyError("The search found no way to keep all pins and algo parameters.", fix="leave some of them out")
        return solution

    def plan_of(self, setup: Setup, tables: Tables, solution: Solution) -> Found:
        """Reads the plan from a solution, and places the values that the solver leaves open."""
        chosen = tables.assignment(solution.states[: len(tables.choices)], self.mode)
        return self.placed(setup, tables, chosen)._replace(cost_s=solution.cost, lower_bound_s=solution.lower_bound, counts=solution.counts)

    def placed(self, setup: Setup, tables: Tables, chosen: Assignment) -> Found:
        """Places the values that an assignment leaves open; returns a plan without a cost."""
        space = tables.space
        entered = enter_as_stored(space, chosen)
        ways = [entered] if entered is chosen or only_free_enter(space, chosen, entered) else [entered, chosen]
        placed = [place_free_values(space, store_as_read(space, way, tables.pins), tables.pins) for way in ways]
        assignment = placed[0] if len(placed) == 1 else min(placed, key=partial(self._price_s, mesh=setup.mesh))
        # The batch lies as the plan has it; the user asked for nothing else.
        asked = {value: sharding for value, sharding in setup.seeds.items() if value in setup.partial_pins}
        return Found(replace(setup, seeds=asked), assignment, 0.0, 0.0, {})

    def peak_of(self, found: Found, *, is_likely: bool = False) -> Peak:
        """Returns the op at which most bytes are alive, copies included, and how many are safe to allow for, or likely."""
        return peak_in(self.bill_of(found), is_likely=is_likely)

    def bill_of(self, found: Found) -> Bill:
        """Returns the bill of a plan."""
        return bill_of(self.step, found.assignment, found.setup.mesh, self.topology)

    def fits(self, found: Found, memory_bytes: int | None, *, is_likely: bool = False) -> bool:
        """Returns whether the safe end of a plan's peak, or the likely one, is within a budget."""
        return memory_bytes is None or self.peak_of(found, is_likely=is_likely).bytes <= memory_bytes

    def _price_s(self, assignment: Assignment, mesh: LogicalMesh) -> float:
        return bill_of(self.step, assignment, mesh, self.topology).total_s


def peak_in(bill: Bill, *, is_likely: bool = False) -> Peak:
    """Returns the op at which most bytes are alive, and how many are safe to allow for, or likely."""
    return Peak(bill.memory_profile.index(bill.memory_bytes), bill.memory_bytes if is_likely else bill.safe_bytes)


def _numbered(pins: Mapping[int, object]) -> dict[int, int]:
    """Numbers pins from 1 on; equal pins get equal numbers."""
    numbers: dict[object, int] = {}
    return {slot: numbers.setdefault(sharding, len(numbers) + 1) for slot, sharding in pins.items()}
