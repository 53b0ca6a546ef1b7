"""recursive_programming: the devices are split axis by axis, each main op by element counts; then few splits are searched exactly.

1. fold      repeated layers decide alike: `network`, `recursive_fold`
2. rounds    one per prime factor of the device count (or per axis of the user's mesh): `recursive_rounds`
3. mesh      rounds that cut alike become one axis, three axes at most: `recursive_mesh`
4. exact     what dynamic programming searches, restricted to few splits on few meshes: `recursive_splits`
5. stages    a stage count for a pipeline, where the user asked for one: `recursive_stages`

`recursive_plan` takes all steps, this file 1 to 4.

Where the user set mem_coeff, the cuts of step 2 stand, on the mesh of step 3, and step 4 decides the other ops. Else step 4
decides all ops. A large program is then searched on two axes of about one size, which together serve as one too: its plans are a
few hundredths dearer at most than those on the best mesh. A small program is searched on all meshes of one or two axes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spmdctx.cost.step import Step
from spmdctx.errors import StrategyError
from spmdctx.ir.graph import Graph
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import FactorAxes
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.results import Beaten, DynamicOptions, Found, Shortfall
from spmdctx.search.dynamic.searcher import Searcher, mesh_is_fixed
from spmdctx.search.problem.space import Space
from spmdctx.search.problem.tables import Tables
from spmdctx.search.recursive.fold import Folded, folded_program
from spmdctx.search.recursive.mesh import join_axes, joined_mesh, round_mesh, translate_all
from spmdctx.search.recursive.rounds import Decided, decide, log_rounds
from spmdctx.search.recursive.splits import FewSplits
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.meshes import candidate_meshes
from spmdctx.search.setup.modes import prepare
from spmdctx.search.setup.request import Request, Setup
from spmdctx.search.solver.problem.problem import Problem, Solution
from spmdctx.search.solver.solve import Sought

LOG = logging.getLogger("spmdctx")
MODE = "recursive_programming"
DEFAULT_MEM_COEFF = 0.1
SMALL_PROGRAM = 500
"""Ops up to which meshes of two axes are searched too."""

_TOLERANCE = 0.02
"""How far above the optimum a search may end."""


@dataclass(frozen=True, slots=True)
class RecursiveOptions:
    """What the context says to this search.

    Attributes:
        mem_coeff: price of cutting the rows of a matrix product, against 1 for its other edges.
        binding: whether the cuts that follow from it stand against the common price.
        memory_bytes: budget per device, None for none.
        max_stages: pipeline stages to suggest at most; 0 to suggest none.
        limits: parameters of the search.
    """

    mem_coeff: float = DEFAULT_MEM_COEFF
    binding: bool = False
    memory_bytes: int | None = None
    max_stages: int = 0
    limits: AlgoLimits = field(default_factory=AlgoLimits)


class Recursive(Searcher):
    """The search on one program.

    Args:
        step: the traced step.
        topology: the machine.
        options: see there.
    """

    # The first layers and the last are split as those between: there are half as many nodes, and plans are as good.
    _fold_rounds = 1

    def __init__(self, step: Step, topology: Topology, options: RecursiveOptions) -> None:
        limits = replace(options.limits, tolerance=max(_TOLERANCE, options.limits.tolerance))
        super().__init__(step, topology, DynamicOptions(options.memory_bytes, limits))
        self._asked = options
        self._cuts: dict[int, FactorAxes] = {}

    def plan(self, request: Request) -> Found | Shortfall:
        """The cheapest assignment that was found, or what it lacks memory for.

        Raises:
            StrategyError: pins that do not fit the devices.
        """
        best: Found | None = None
        least: Shortfall | None = None
        for setup in self._setups(request):
            known_s = float("inf") if best is None else best.cost_s * (1 - max(1e-6, self._asked.limits.tolerance))
            found = self.search(setup, known_s)
            if isinstance(found, Shortfall):
                least = found if least is None or found.enough_bytes < least.enough_bytes else least
            elif isinstance(found, Found) and found.cost_s < known_s:
                best = found
        if best is not None:
            return best
        assert least is not None
        return least

    def _setups(self, request: Request) -> list[Setup]:
        """The meshes to search: that of the rounds only, where the user, his strategies or his mem_coeff decide it."""
        setup, is_free = _prepare(self._step.graph, request)
        is_decided = not is_free or self._asked.binding or mesh_is_fixed(request)
        # What would not be used is worked out for the log only.
        own = self._rounds(request, setup, is_free=is_free) if is_decided or LOG.isEnabledFor(logging.INFO) else setup
        if is_decided:
            return [own]
        meshes = candidate_meshes(request.num_devices, self._topology, 2)
        if len(self._step.graph.ops) > SMALL_PROGRAM:
            meshes = [min(meshes, key=lambda mesh: max(mesh.shape))]
        return [prepare(self._step.graph, replace(request, mesh=mesh)) for mesh in meshes]

    def _fastest_on(self, setup: Setup, known_s: float) -> Found | Beaten:
        tables = self._tables(setup)
        joined = tables.joined()
        solution = self._solve(Sought(joined.problem, tolerance=self._options.limits.tolerance), known_s)
        if solution.lower_bound >= known_s:
            return Beaten(solution.lower_bound)
        return self._found(setup, tables, joined.apart(solution))

    def _tables(self, setup: Setup) -> FewSplits:
        space = self._space_on(setup.mesh)
        return FewSplits(self._network(space, setup), space, setup, self._options.limits, self._cuts)

    def _space_on(self, mesh: LogicalMesh) -> Space:
        if self._space is None:
            self._space = Space(self._step.graph, mesh, self._topology, self._step.loose)
        return self._space if self._space.mesh == mesh else self._space.on(mesh)

    def _found(self, setup: Setup, tables: Tables, solution: Solution) -> Found:
        found = super()._found(setup, tables, solution)
        return found._replace(assignment=replace(found.assignment, mode=MODE))

    def _in_budget(self, tables: Tables, problem: Problem, fastest: Found, known_s: float) -> Found | Shortfall | Beaten:
        found = super()._in_budget(tables, problem, fastest, known_s)
        if isinstance(found, Found):
            unfit, budget = f"the cheapest plan on a mesh {found.setup.mesh.shape} does not fit", self._options.memory_bytes
            found.setup.notes.append(f"memory_bytes={budget}: {unfit}, this one does.")
        return found

    def _rounds(self, request: Request, setup: Setup, *, is_free: bool) -> Setup:
        """Steps 1 to 3; keeps the cuts where they stand."""
        space = self._space_on(setup.mesh)
        folded = folded_program(space, self._network(space, setup).folded)
        small = Space(folded.graph, setup.mesh, self._topology, folded.loose, self._asked.limits)
        decided = self._decided(small, folded, setup)
        log_rounds(folded.graph, setup.mesh, decided.decisions, [members[0] for members in folded.members])
        names: dict[str, tuple[str, AxisNames]] = {name: (name, (name,)) for name in setup.mesh.names}
        if is_free:
            groups = join_axes(setup.mesh, _uses(decided, setup))
            mesh = joined_mesh(setup.mesh, groups)
            if mesh != setup.mesh:
                setup = prepare(self._step.graph, replace(request, mesh=mesh))
                if _is_exact(decided, groups):
                    names = {name: (joined, group) for joined, group in zip(mesh.names, groups, strict=True) for name in group}
                else:
                    decided = self._decided(small.on(mesh), folded, setup)
                    names = {name: (name, (name,)) for name in mesh.names}
        if self._asked.binding:
            self._keep(folded, decided, names)
        return setup

    def _decided(self, small: Space, folded: Folded, setup: Setup) -> Decided:
        return decide(small, folded.setup(setup, self._space_on(setup.mesh)), self._asked.mem_coeff, folded.followers, folded.inputs)

    def _keep(self, folded: Folded, decided: Decided, names: Mapping[str, tuple[str, AxisNames]]) -> None:
        """The cuts stand; a backward product is cut as its operands are."""
        cuts = {index: decision.axes for index, decision in decided.decisions.items()}
        cuts.update((index, decided.space.choose(index, decided.spreader.state).axes) for index in sorted(folded.followers))
        for index, axes in cuts.items():
            self._cuts.update(dict.fromkeys(folded.members[index], translate_all(axes, names)))


def _prepare(graph: Graph, request: Request) -> tuple[Setup, bool]:
    """The set-up on one axis per round; on the user's own axes where he has any, which are then not joined either."""
    if request.mesh is not None or request.manual or any(pin.mesh_axes for pin in request.value_pins):
        return prepare(graph, request), False
    try:
        return prepare(graph, replace(request, mesh=round_mesh(request.num_devices))), True
    except StrategyError:
        return prepare(graph, request), False


def _uses(decided: Decided, setup: Setup) -> list[tuple[AxisNames, float]]:
    ops = decided.space.graph.ops
    weights: dict[AxisNames, float] = {}
    for index, decision in decided.decisions.items():
        for names in decision.axes:
            if names:
                weights[names] = weights.get(names, 0.0) + 1.0 + ops[index].flops * ops[index].repeats
    for sharding in (*setup.pins.values(), *setup.forced.values()):
        for names in sharding:
            if names:
                weights[names] = float("inf")
    return list(weights.items())


def _is_exact(decided: Decided, groups: list[AxisNames]) -> bool:
    """Whether every cut takes whole groups."""
    used = {names for decision in decided.decisions.values() for names in decision.axes}
    return all(set(group).isdisjoint(names) or set(group) <= set(names) for names in used for group in groups)
