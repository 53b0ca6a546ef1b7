"""recursive_programming: the devices are split axis by axis, each main op by element counts; then few splits are searched exactly.

1. fold      repeated layers decide alike: `problem.network`, `fold`
2. rounds    one per prime factor of the device count (or per axis of the user's mesh): `rounds`
3. mesh      rounds that cut alike become one axis, three axes at most: `mesh`
4. exact     the search of dynamic programming, restricted to few splits on few meshes: `splits`
5. stages    a stage count for a pipeline, if the user asked for one: `stages`

`plan` takes all steps, this file 1 to 4.

If the user set mem_coeff, the cuts of step 2 stand, on the mesh of step 3, and step 4 decides the other ops. Else step 4
decides all ops. A large program is then searched on two axes of about one size, which together serve as one too: its plans cost a
few hundredths more at most than those on the best mesh. A small program is searched on all meshes of one or two axes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from spmdctx.cost.step import Step
from spmdctx.errors import StrategyError
from spmdctx.ir.graph import Graph
from spmdctx.ir.projection import FactorAxes
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.budget import Budget
from spmdctx.search.dynamic.formulation import Formulation, MeshProblem
from spmdctx.search.dynamic.results import Beaten, DynamicOptions, Found, Search, Shortfall
from spmdctx.search.dynamic.searcher import mesh_is_fixed
from spmdctx.search.problem.fold import Folding
from spmdctx.search.problem.space import Space
from spmdctx.search.recursive.fold import Folded, folded_program
from spmdctx.search.recursive.mesh import join_axes, joined_mesh, round_mesh, translate_all
from spmdctx.search.recursive.rounds import Decided, decide, log_rounds
from spmdctx.search.recursive.splits import FewSplits
from spmdctx.search.setup.blocks import joined_axes, with_blocks, without_blocks
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.meshes import candidate_meshes
from spmdctx.search.setup.modes import prepare
from spmdctx.search.setup.request import Request, Setup

LOG = logging.getLogger("spmdctx")
MODE = "recursive_programming"
DEFAULT_MEM_COEFF = 0.1
_TOLERANCE = 0.02
"""The gap above the optimum at which a search may end."""

_FOLDING = Folding(rounds=1, small_program=200, most=1.0)
"""Lets the first and last layers be split like those between. That halves the nodes, and plans are as good."""


@dataclass(frozen=True, slots=True)
class RecursiveOptions:
    """The options of this search, which the context gives.

    Attributes:
        mem_coeff: price of cutting the rows of a matrix product, against 1 for its other edges.
        binding: whether the cuts that follow from it stand against the common price.
        memory_bytes: budget per device, None for none.
        limits: parameters of the search.
        wants_any: whether any plan within the budget will do.
        small_program: ops up to which all meshes of one or two axes are searched.
    """

    mem_coeff: float = DEFAULT_MEM_COEFF
    binding: bool = False
    memory_bytes: int | None = None
    limits: AlgoLimits = field(default_factory=AlgoLimits)
    wants_any: bool = False
    small_program: int = 500


class RecursiveSearcher(Search):
    """The search on one program.

    Args:
        step: the traced step.
        topology: the machine.
        options: see there.
    """

    def __init__(self, step: Step, topology: Topology, options: RecursiveOptions) -> None:
        limits = replace(options.limits, tolerance=max(_TOLERANCE, options.limits.tolerance))
        self._step, self._topology, self._options = step, topology, options
        self._within = DynamicOptions(options.memory_bytes, limits, wants_any=options.wants_any)
        self._cuts: dict[int, FactorAxes] = {}
        self._formulation: Formulation[FewSplits] = Formulation(
            step, topology, limits, partial(FewSplits, cuts=self._cuts), mode=MODE, folding=_FOLDING
        )

    def plan(self, request: Request) -> Found | Shortfall:
        """Finds the cheapest assignment of this search, or the memory that it lacks.

        Raises:
            StrategyError: pins that do not fit the devices.
        """
        best: Found | None = None
        least: Shortfall | None = None
        for setup in self._setups(request):
            known_s = float("inf") if best is None else best.cost_s * (1 - max(1e-6, self._options.limits.tolerance))
            found = self.search(setup, known_s)
            if isinstance(found, Shortfall):
                least = found if least is None or found.enough_bytes < least.enough_bytes else least
            elif isinstance(found, Found) and found.cost_s < known_s:
                best = found
        if best is not None:
            return _as_plan(best)
        assert least is not None
        return least._replace(fastest=_as_plan(least.fastest), joined=joined_axes(least.fastest.setup.mesh))

    def search(self, setup: Setup, known_s: float = float("inf")) -> Found | Shortfall | Beaten:
        """Finds the cheapest plan on the mesh of a set-up within the budget, if there is one below `known_s`."""
        formulation, memory_bytes = self._formulation, self._options.memory_bytes
        fastest = self._fastest_on(setup, known_s)
        if isinstance(fastest, Beaten) or formulation.fits(fastest, memory_bytes):
            return fastest
        tables = formulation.tables(setup)
        budget = Budget(formulation, self._within, formulation.bill_of(fastest))
        found = budget.search_alone(MeshProblem(tables, tables.problem(), fastest), known_s)
        if isinstance(found, Found):
            unfit = f"the cheapest plan on a mesh {found.setup.mesh.shape} does not fit"
            found.setup.notes.append(f"memory_bytes={memory_bytes}: {unfit}, this one does.")
        return found

    def _setups(self, request: Request) -> list[Setup]:
        """Lists the meshes to search: only that of the rounds if the user, their strategies or their mem_coeff decide it."""
        setup, is_free = _prepare(self._step.graph, request)
        is_decided = not is_free or self._options.binding or mesh_is_fixed(request)
        # Rounds whose result is not used still run for the log.
        own = self._rounds(request, setup, is_free=is_free) if is_decided or LOG.isEnabledFor(logging.INFO) else setup
        if is_decided:
            return [own]
        meshes = candidate_meshes(request.num_devices, self._topology, 2)
        if len(self._step.graph.ops) > self._options.small_program:
            meshes = [min(meshes, key=lambda mesh: max(mesh.shape))]
        return [prepare(self._step.graph, replace(request, mesh=mesh)) for mesh in meshes]

    def _fastest_on(self, setup: Setup, known_s: float) -> Found | Beaten:
        tables = self._formulation.tables(setup)
        joined = tables.joined()
        solution = self._formulation.solve(self._formulation.sought(joined.problem), known_s)
        if solution.lower_bound >= known_s:
            return Beaten(solution.lower_bound)
        return self._formulation.plan_of(setup, tables, joined.of_nodes(solution))

    def _rounds(self, request: Request, setup: Setup, *, is_free: bool) -> Setup:
        """Runs steps 1 to 3, and keeps the cuts if they stand."""
        space = self._formulation.space_on(setup.mesh)
        folded = folded_program(space, self._formulation.network(space, setup).folded)
        small = Space(folded.graph, setup.mesh, self._topology, folded.from_literals, self._options.limits)
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
        if self._options.binding:
            self._keep(folded, decided, names)
        return setup

    def _decided(self, small: Space, folded: Folded, setup: Setup) -> Decided:
        own = folded.setup(setup, self._formulation.space_on(setup.mesh))
        return decide(small, own, self._options.mem_coeff, folded.followers, folded.inputs)

    def _keep(self, folded: Folded, decided: Decided, names: Mapping[str, tuple[str, AxisNames]]) -> None:
        """Keeps the cuts; a backward product is cut like its operands."""
        cuts = {index: decision.axes for index, decision in decided.decisions.items()}
        cuts.update((index, decided.space.choose(index, decided.spreader.state).axes) for index in sorted(folded.followers))
        for index, axes in cuts.items():
            self._cuts.update(dict.fromkeys(folded.members[index], translate_all(axes, names)))


def _as_plan(found: Found) -> Found:
    return found._replace(setup=without_blocks(found.setup))


def _prepare(graph: Graph, request: Request) -> tuple[Setup, bool]:
    """Prepares the set-up on one axis per round; returns it, and whether its axes may be joined.

    If the user's mesh, shard_maps or constraints name axes, the set-up is on these. Of many, some are used only together.
    """
    if request.mesh is not None or request.manual or any(pin.mesh_axes for pin in request.value_pins):
        return with_blocks(graph, prepare(graph, request)), False
    try:
        return prepare(graph, replace(request, mesh=round_mesh(request.num_devices))), True
    except StrategyError:
        return with_blocks(graph, prepare(graph, request)), False


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
    """Returns whether every cut takes whole groups."""
    used = {names for decision in decided.decisions.values() for names in decision.axes}
    return all(set(group).isdisjoint(names) or set(group) <= set(names) for names in used for group in groups)
