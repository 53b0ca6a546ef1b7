"""dynamic_programming: the cheapest choice of a split for every op, with a proof.

With one state `x_n` per node of the network (an op's split and what becomes of its results, a slot's sharding, a use's sharding)

    minimise    sum_n weight_n seconds_n(x_n)  +  sum of weight * reshard seconds over the edges
    subject to  bytes alive at every op  <=  memory_bytes

over every legal split on every mesh that is tried. The solver minimises exactly; what it cannot prove it bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spmdctx.cost.topology import Topology
from spmdctx.ir import Assignment, Graph, TensorSharding
from spmdctx.mesh import LogicalMesh
from spmdctx.search.algo import AlgoLimits
from spmdctx.search.free_values import place_free_values
from spmdctx.search.memory import StepMemory
from spmdctx.search.meshes import candidate_meshes
from spmdctx.search.modes import Request, Setup, prepare
from spmdctx.search.network import Network, build_network
from spmdctx.search.solver.problem import Infeasible
from spmdctx.search.solver.solve import solve
from spmdctx.search.space import Space
from spmdctx.search.tables import Tables

MODE = "dynamic_programming"


@dataclass(frozen=True, slots=True)
class DynamicOptions:
    """What the search is asked for.

    Attributes:
        memory_bytes: budget per device, None for none.
        limits: parameters of the search.
        max_axes: of the meshes that are tried.
    """

    memory_bytes: int | None = None
    limits: AlgoLimits = field(default_factory=AlgoLimits)
    max_axes: int = 2


class Found(NamedTuple):
    """The best assignment on one mesh.

    `cost_s` is what the search minimises, `lower_bound_s` what no assignment in its space goes below.
    """

    setup: Setup
    assignment: Assignment
    cost_s: float
    lower_bound_s: float
    counts: Mapping[str, int]


def plan_dynamic(
    graph: Graph,
    scopes: Sequence[int],
    request: Request,
    topology: Topology,
    loose: frozenset[int],
    step_memory: Callable[[], StepMemory],
    options: DynamicOptions,
) -> Found:
    """The cheapest assignment over all meshes that may be tried, which are the user's where he or his strategies name one."""
    searcher = _Searcher(graph, scopes, topology, loose, step_memory, options)
    first = prepare(graph, request)
    if request.mesh is not None or request.marks or request.value_pins or request.manual:
        return searcher.search(first)
    best: Found | None = None
    bound = float("inf")
    for mesh in candidate_meshes(request.num_devices, topology, options.max_axes):
        found = searcher.search(prepare(graph, replace(request, mesh=mesh)))
        bound = min(bound, found.lower_bound_s)
        if best is None or found.cost_s < best.cost_s * (1 - 1e-6):
            best = found
    assert best is not None
    return best._replace(lower_bound_s=bound)


class _Searcher:
    """Searches one mesh after the other; the network is built once for each pattern of pins."""

    def __init__(
        self,
        graph: Graph,
        scopes: Sequence[int],
        topology: Topology,
        loose: frozenset[int],
        step_memory: Callable[[], StepMemory],
        options: DynamicOptions,
    ) -> None:
        self._graph, self._scopes, self._topology, self._loose = graph, tuple(scopes), topology, loose
        self._step_memory, self._options = step_memory, options
        self._space: Space | None = None
        self._networks: dict[object, Network] = {}

    def search(self, setup: Setup) -> Found:
        """The cheapest assignment on the mesh of a set-up."""
        space = self._on(setup.mesh)
        pins = {space.slot_of[value]: sharding for value, sharding in setup.pins.items()}
        network = self._network(space, setup, pins)
        tables = Tables(network, space, setup, self._options.limits)
        problem = tables.problem()
        solution = solve(problem, tolerance=self._options.limits.tolerance)
        assert not isinstance(solution, Infeasible)
        assignment = place_free_values(space, tables.assignment(solution.states, MODE))
        return Found(setup, assignment, solution.cost, solution.lower_bound, solution.counts)

    def _on(self, mesh: LogicalMesh) -> Space:
        if self._space is None:
            self._space = Space(self._graph, mesh, self._topology, self._loose)
        return self._space.on(mesh)

    def _network(self, space: Space, setup: Setup, pins: Mapping[int, TensorSharding]) -> Network:
        marks = _numbered({**{space.slot_of[v]: dims for v, dims in setup.partial_pins.items()}, **pins})
        key = (tuple(sorted(marks.items())), tuple(sorted(setup.forced)))
        known = self._networks.get(key)
        if known is None:
            known = self._networks[key] = build_network(space, self._scopes, marks, setup.forced)
        return known


def _numbered(pins: Mapping[int, object]) -> dict[int, int]:
    """Equal pins by equal numbers from 1 on."""
    numbers: dict[object, int] = {}
    return {slot: numbers.setdefault(sharding, len(numbers) + 1) for slot, sharding in pins.items()}
