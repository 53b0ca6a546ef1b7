"""recursive_programming: the devices are split axis by axis, each main op by element counts, then a polish in seconds.

1. rounds    one per prime factor of the device count (or per axis of the user's mesh): `recursive_rounds`
2. mesh      rounds that cut alike become one axis, three axes at most: `recursive_mesh`
3. spread    the cuts spread through the other ops as in propagation
4. polish    parameters change together with their optimizer state (`recursive_storage`), slots one by one (`propagation`);
             the plan of the rounds competes with one that only splits the batch, and the cheaper by the common model stays
5. budget    while the peak is over it, what is live there is split further: `recursive_memory`

Where the user set mem_coeff, the cuts of step 1 stand: an op that was not cut is computed whole, whatever it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spmdctx.cost.topology import Topology
from spmdctx.errors import StrategyError
from spmdctx.ir import Assignment, AxisNames, Graph, OpSharding, Role
from spmdctx.mesh import LogicalMesh
from spmdctx.search.algo import AlgoLimits
from spmdctx.search.modes import Request, Setup, prepare
from spmdctx.search.propagation import Spreader, free_loose_values, settle
from spmdctx.search.recursive_mesh import join_axes, joined_mesh, round_mesh, translate_all
from spmdctx.search.recursive_rounds import Decided, backward_products, decide, log_rounds
from spmdctx.search.recursive_storage import settle_blocks, storage_blocks
from spmdctx.search.space import Choice, Space
from spmdctx.search.transfer import FactorAxes

MODE = "recursive_programming"
DEFAULT_MEM_COEFF = 0.1
_POLISH_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class RecursiveOptions:
    """What the context says to this search.

    Attributes:
        mem_coeff: price of cutting the rows of a matrix product, against 1 for its other edges.
        binding: whether the cuts that follow from it stand against the common price.
        memory_bytes: budget per device.
        limits: parameters of the search.
    """

    mem_coeff: float = DEFAULT_MEM_COEFF
    binding: bool = False
    memory_bytes: int | None = None
    limits: AlgoLimits = field(default_factory=AlgoLimits)


class BoundSpace(Space):
    """A space in which some ops have their axes already, and are priced so."""

    bound: Mapping[int, FactorAxes]

    @classmethod
    def of(cls, space: Space, bound: Mapping[int, FactorAxes]) -> Space:
        """The space with these ops bound; it shares its memos with the one it is made from."""
        if not bound:
            return space
        other = cls.__new__(cls)
        other.__dict__.update(space.__dict__)
        other.bound = bound
        return other

    def choose(self, index: int, state: list[int]) -> Choice:
        """The cheapest candidate of an op, or what it is bound to."""
        axes = self.bound.get(index)
        return super().choose(index, state) if axes is None else self.price_of(index, axes, state)


class _Start(NamedTuple):
    """A sharding number per slot on some mesh, and the slots that must stay."""

    space: Space
    setup: Setup
    state: list[int]
    fixed: set[int]


def plan_recursive(
    graph: Graph, request: Request, topology: Topology, loose: frozenset[int], options: RecursiveOptions
) -> tuple[Setup, Assignment]:
    """Finds the mesh, where the user gave none, and an assignment on it.

    Args:
        graph: the traced step.
        request: what the user asked for.
        topology: the machine.
        loose: values that depend on no input.
        options: see there.

    Returns:
        The set-up on the mesh that was found, and the assignment.

    Raises:
        StrategyError: pins that do not fit the devices.
        InfeasibleError: the budget cannot be met.
    """
    setup, is_free = _prepare(graph, request)
    if setup.mesh.num_devices == 1:
        return setup, _whole(graph)
    space = Space(graph, setup.mesh, topology, loose, options.limits)
    start = _round_start(space, setup, request if is_free else None, options)
    starts = [start, *([] if options.binding else _batch_starts(start, graph, request, is_free))]
    best, best_s = starts[0], _polish(starts[0])
    for other in starts[1:]:
        time_s = _polish(other)
        if time_s < best_s * (1 - max(1e-6, options.limits.tolerance)):
            best, best_s = other, time_s
    best.setup.seeds = {value: axes for value, axes in best.setup.seeds.items() if graph.values[value].role is not Role.BATCH}
    return best.setup, _assignment(best)


def _prepare(graph: Graph, request: Request) -> tuple[Setup, bool]:
    """The set-up on one axis per round; on the user's own axes where he has any, which are then not joined either."""
    owns_axes = request.mesh is not None or request.manual or any(pin.mesh_axes for pin in request.value_pins)
    if owns_axes or request.num_devices == 1:
        return prepare(graph, request), False
    try:
        return prepare(graph, replace(request, mesh=round_mesh(request.num_devices))), True
    except StrategyError:
        return prepare(graph, request), False


def _whole(graph: Graph) -> Assignment:
    ops = tuple([OpSharding(((),) * len(op.rule.sizes)) for op in graph.ops])
    return Assignment(ops, tuple([((),) * len(value.shape) for value in graph.values]), MODE)


def _round_start(space: Space, setup: Setup, free: Request | None, options: RecursiveOptions) -> _Start:
    """Steps 1 to 3; `free` is the request where the axes of the rounds may be joined."""
    followers = backward_products(space.graph)
    decided = decide(space, setup, options.mem_coeff, followers)
    log_rounds(space.graph, space.mesh, decided.decisions)
    if free is not None:
        groups = join_axes(space.mesh, _uses(decided, setup))
        mesh = joined_mesh(space.mesh, groups)
        if mesh != space.mesh:
            names = {name: (joined, group) for joined, group in zip(mesh.names, groups, strict=True) for name in group}
            setup = prepare(space.graph, replace(free, mesh=mesh))
            if _is_exact(decided, groups):
                return _spread(space.on(mesh), setup, decided, names, options.binding)
            decided = decide(space.on(mesh), setup, options.mem_coeff, followers)
    return _spread(decided.space, setup, decided, {name: (name, (name,)) for name in decided.space.mesh.names}, options.binding)


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
    whole = [set(group) for group in groups]
    used = {names for decision in decided.decisions.values() for names in decision.axes}
    return all(not group & set(names) or group <= set(names) for names in used for group in whole)


def _spread(space: Space, setup: Setup, decided: Decided, names: Mapping[str, tuple[str, AxisNames]], binding: bool) -> _Start:
    """The cuts on the final mesh, spread through all ops."""
    cuts = {index: translate_all(decision.axes, names) for index, decision in decided.decisions.items()}
    spreader = Spreader(space, setup.pins, {**cuts, **setup.forced}, setup.one_way)
    old = decided.spreader.state
    numbers = {number: space.number(translate_all(decided.space.shardings[number], names)) for number in set(old[:-1])}
    for slot, number in enumerate(old[:-1]):
        if slot not in spreader.fixed:
            spreader.state[slot] = numbers[number]
    spreader.spread()
    bound = {**(cuts if binding else {}), **setup.forced}
    return _Start(BoundSpace.of(space, bound), setup, spreader.state, spreader.fixed)


def _batch_starts(start: _Start, graph: Graph, request: Request, is_free: bool) -> list[_Start]:
    """The batch split over all devices, where the rounds did something else."""
    space, setup = start.space, start.setup
    if is_free and len(space.mesh.axes) > 1 and not setup.pins:
        setup = prepare(graph, replace(request, mesh=LogicalMesh.of((request.num_devices,))))
        space = space.on(setup.mesh)
    spreader = Spreader(space, setup.pins, setup.forced, setup.one_way)
    for value, sharding in setup.seeds.items():
        slot = space.slot_of[value]
        if slot not in spreader.fixed:
            spreader.put(slot, sharding)
    spreader.spread()
    if space is start.space and spreader.state == start.state:
        return []
    return [_Start(BoundSpace.of(space, setup.forced), setup, spreader.state, spreader.fixed)]


def _polish(start: _Start) -> float:
    """Step 4 on one start; returns its predicted seconds."""
    space, state = start.space, start.state
    blocks = storage_blocks(space)
    for _ in range(_POLISH_ROUNDS):
        moved = settle_blocks(space, state, start.fixed, blocks)
        settle(space, state, start.fixed, {})
        if not moved:
            break
    free_loose_values(space, state, start.fixed)
    return sum([space.choose(index, state).time_s * op.repeats for index, op in enumerate(space.graph.ops)])


def _assignment(start: _Start) -> Assignment:
    space, state = start.space, start.state
    ops = tuple([space.choose(index, state).sharding for index in range(len(space.op_slots))])
    return Assignment(ops, tuple([space.shardings[state[slot]] for slot in space.slot_of]), MODE)
