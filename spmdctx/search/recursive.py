"""recursive_programming: the devices are split axis by axis, each main op by element counts, then a polish in seconds.

1. fold      repeated layers decide alike: `recursive_fold`
2. rounds    one per prime factor of the device count (or per axis of the user's mesh): `recursive_rounds`
3. mesh      rounds that cut alike become one axis, three axes at most: `recursive_mesh`
4. spread    the cuts spread through the other ops as in propagation
5. polish    parameters change together with their optimizer state (`recursive_storage`), slots one by one (`propagation`)
6. compare   the same with rounds that prefer to cut weights on the last axis, for as long as that gets cheaper
7. refine    in the two cheapest, activations move together with the weights around them (`recursive_regions`); each is also
             tried with every stored tensor split, and the common model decides
8. budget    the cheapest plan that fits, split further where none does: `recursive_memory`
9. stages    a stage count for a pipeline, where the user asked for one: `recursive_stages`

`recursive_plan` takes all steps, this file 1 to 7.

Where the user set mem_coeff, the cuts of step 2 stand: there are no steps 6 and 7, and an op that was not cut is computed whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spmdctx.cost.topology import Topology
from spmdctx.errors import StrategyError
from spmdctx.ir import Assignment, AxisNames, Graph, OpSharding, TensorSharding
from spmdctx.mesh import LogicalMesh
from spmdctx.search.algo import AlgoLimits
from spmdctx.search.modes import Request, Setup, prepare
from spmdctx.search.price import price
from spmdctx.search.propagation import Spreader, free_loose_values, settle
from spmdctx.search.recursive_fold import Folded, fold_program
from spmdctx.search.recursive_mesh import join_axes, joined_mesh, round_mesh, translate_all
from spmdctx.search.recursive_regions import Region, activation_regions, settle_inputs, settle_regions
from spmdctx.search.recursive_rounds import Decided, decide, log_rounds, main_ops
from spmdctx.search.recursive_shared import SharedPrice
from spmdctx.search.recursive_storage import Block, settle_blocks, split_block, storage_blocks
from spmdctx.search.space import Choice, Space
from spmdctx.search.transfer import FactorAxes

MODE = "recursive_programming"
DEFAULT_MEM_COEFF = 0.1
_WEIGHTS_FIRST = 1e6
"""A mem_coeff that cuts rows only where nothing else can be cut."""

_REFINED, _REFINEMENTS = 2, 2
"""How many of the plans are refined, and how often."""


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
        other.bound = dict(bound)
        return other

    def choose(self, index: int, state: list[int]) -> Choice:
        """The cheapest candidate of an op, or what it is bound to."""
        axes = self.bound.get(index)
        return super().choose(index, state) if axes is None else self.price_of(index, axes, state)


class Outcome(NamedTuple):
    """One polished plan: a sharding number per slot of the folded graph on some mesh, the fixed slots, and seconds."""

    space: Space
    setup: Setup
    state: list[int]
    fixed: set[int]
    time_s: float
    is_first: bool = False


class Recursive:
    """The search on one program.

    `outcomes` are all plans that were compared, the cheapest first, on the `folded` program, whose stored tensors are in `blocks`.

    Args:
        graph: the traced step.
        scopes: per op the computation that it belongs to (`Program.scopes`).
        request: what the user asked for.
        topology: the machine.
        loose: values that depend on no input.
        options: see there.

    Raises:
        StrategyError: pins that do not fit the devices.
    """

    def __init__(
        self,
        graph: Graph,
        scopes: Sequence[int],
        request: Request,
        topology: Topology,
        loose: frozenset[int],
        options: RecursiveOptions,
    ) -> None:
        self._scopes, self._request, self._options = scopes, request, options
        setup, self._is_free = _prepare(graph, request)
        self.space = Space(graph, setup.mesh, topology, loose, options.limits)
        self.folded: Folded = fold_program(self.space, setup)
        self._small = Space(self.folded.graph, setup.mesh, topology, self.folded.loose, options.limits)
        self.blocks: list[Block] = storage_blocks(self._small)
        self._regions: list[Region] = activation_regions(self._small, main_ops(self.folded.graph), self.blocks)
        stored = {slot for block in self.blocks for slot in block.slots}
        self._arguments = [value for value in self.folded.graph.inputs if value not in stored]
        self.outcomes = [self._polished(*self._rounds(setup))._replace(is_first=True)]
        if not options.binding:
            self.outcomes += self._others(setup)
            self.outcomes.sort(key=self._merit)
            refined = [self._refined(outcome) for outcome in self.outcomes[:_REFINED]]
            self.outcomes[:_REFINED] = [*refined, *map(self._stored_apart, refined)]
            self.outcomes = [outcome._replace(time_s=self._billed_s(outcome)) for outcome in self.outcomes]
            self.outcomes.sort(key=self._merit)

    def _merit(self, outcome: Outcome) -> float:
        """Seconds; the plan of the rounds stays first where another one is better by no more than the tolerance."""
        margin = max(1e-6, self._options.limits.tolerance) if outcome.is_first else 0.0
        return outcome.time_s * (1 - margin)

    def _rounds(self, setup: Setup) -> tuple[Space, Setup, Spreader]:
        """Steps 2 to 4."""
        small, folded = self._small, self.folded
        decided = decide(small, folded.setup(setup, self.space), self._options.mem_coeff, folded.followers, folded.inputs)
        log_rounds(folded.graph, small.mesh, decided.decisions, [members[0] for members in folded.members])
        names = _same(small.mesh)
        if self._is_free:
            groups = join_axes(small.mesh, _uses(decided, setup))
            mesh = joined_mesh(small.mesh, groups)
            if mesh != small.mesh:
                setup = self._setup_on(mesh)
                if _is_exact(decided, groups):
                    names = {name: (joined, group) for joined, group in zip(mesh.names, groups, strict=True) for name in group}
                    return self._spread(small.on(mesh), setup, decided, names)
                again = folded.setup(setup, self.space)
                decided = decide(small.on(mesh), again, self._options.mem_coeff, folded.followers, folded.inputs)
                names = _same(mesh)
        return self._spread(decided.space, setup, decided, names)

    def _setup_on(self, mesh: LogicalMesh) -> Setup:
        return prepare(self.space.graph, replace(self._request, mesh=mesh))

    def _spread(
        self, space: Space, setup: Setup, decided: Decided, names: Mapping[str, tuple[str, AxisNames]], *, bind: bool | None = None
    ) -> tuple[Space, Setup, Spreader]:
        """The cuts on the final mesh, spread through all ops."""
        cuts = {index: translate_all(decision.axes, names) for index, decision in decided.decisions.items()}
        small = self.folded.setup(setup, self.space)
        spreader = Spreader(space, small.pins, {**cuts, **small.forced}, small.one_way)
        old = decided.spreader.state
        numbers = {number: space.number(translate_all(decided.space.shardings[number], names)) for number in set(old[:-1])}
        for slot, number in enumerate(old[:-1]):
            if slot not in spreader.fixed:
                spreader.state[slot] = numbers[number]
        spreader.spread()
        binding = self._options.binding if bind is None else bind
        return BoundSpace.of(space, {**(cuts if binding else {}), **small.forced}), setup, spreader

    def _others(self, setup: Setup) -> Iterator[Outcome]:
        """Step 6: the last axis cuts weights, and grows as long as the plan gets cheaper; first it cuts nothing but the batch."""
        best_s = float("inf")
        for mesh, num_weight_axes in self._shapes(setup.mesh):
            if mesh != setup.mesh:
                try:
                    setup = self._setup_on(mesh)
                except StrategyError:
                    continue
            space = self._small.on(mesh) if mesh != self._small.mesh else self._small
            small = self.folded.setup(setup, self.space)
            rows = len(mesh.axes) - num_weight_axes
            # The batch leaves the axes of the weights alone.
            small = replace(small, seeds={value: _without(dims, mesh.names[rows:]) for value, dims in small.seeds.items()})
            coefficients = [0.0] * rows + [_WEIGHTS_FIRST] * num_weight_axes
            decided = decide(space, small, coefficients, self.folded.followers, self.folded.inputs)
            outcome = self._polished(*self._spread(space, setup, decided, _same(mesh), bind=False))
            yield outcome
            if outcome.time_s > best_s:
                return
            best_s = outcome.time_s

    def _shapes(self, mesh: LogicalMesh) -> Iterator[tuple[LogicalMesh, int]]:
        """Meshes to try, and how many of their last axes cut weights."""
        if not self._is_free:
            yield from ((mesh, count) for count in range(len(mesh.axes) + 1))
            return
        total = mesh.num_devices
        yield LogicalMesh.of((total,)), 0
        columns = 1
        for size in reversed(mesh.shape):
            columns *= size
            yield (LogicalMesh.of((total // columns, columns)), 1) if columns < total else (LogicalMesh.of((total,)), 1)

    def _polished(self, space: Space, setup: Setup, spreader: Spreader) -> Outcome:
        """Step 5: stored tensors, then single slots."""
        settle_blocks(space, spreader.state, spreader.fixed, self.blocks)
        settle(space, spreader.state, spreader.fixed, {})
        settle_inputs(space, spreader.state, spreader.fixed, self._arguments, SharedPrice(space))
        return self.priced(space, setup, spreader.state, spreader.fixed)

    def _refined(self, outcome: Outcome) -> Outcome:
        """Step 7: activations move with the weights around them, then everything settles again."""
        space, setup, state, fixed, _, is_first = outcome
        prices = SharedPrice(space)
        for _ in range(_REFINEMENTS):
            moved = settle_regions(space, state, fixed, self._regions, self.blocks, prices)
            if not (settle_blocks(space, state, fixed, self.blocks) or moved):
                break
            settle(space, state, fixed, {})
            settle_inputs(space, state, fixed, self._arguments, prices)
        return self.priced(space, setup, state, fixed)._replace(is_first=is_first)

    def _stored_apart(self, outcome: Outcome) -> Outcome:
        """The same with every stored tensor split over all devices."""
        space, state = outcome.space, list(outcome.state)
        kept = set(outcome.fixed)
        for block in self.blocks:
            if kept.isdisjoint(block.slots):
                split_block(space, state, block)
                kept.update(slot for slot in block.slots if slot not in block.copies)
        settle(space, state, kept, {})
        return self.priced(space, outcome.setup, state, outcome.fixed)

    def _billed_s(self, outcome: Outcome) -> float:
        """Seconds by the common model, with partial sums merged and overlap discounted."""
        small = outcome.space
        ops = tuple([small.choose(index, outcome.state).sharding for index in range(len(small.op_slots))])
        values = tuple([small.shardings[outcome.state[slot]] for slot in small.slot_of])
        scopes = [self._scopes[members[0]] for members in self.folded.members]
        assignment = Assignment(ops, values, MODE)
        bill = price(small.graph, scopes, self.folded.loose, (), assignment, small.mesh, small.topology)
        return bill.compute_s + bill.communication_s - bill.hidden_communication_s

    def priced(self, space: Space, setup: Setup, state: list[int], fixed: set[int]) -> Outcome:
        """A state with what depends on no input placed for its readers, and its price."""
        free_loose_values(space, state, fixed)
        return Outcome(space, setup, state, fixed, SharedPrice(space).seconds(state, range(len(space.op_slots))))

    def assignment(self, outcome: Outcome) -> Assignment:
        """The plan of the whole program."""
        small, space = outcome.space, self.space.on(outcome.space.mesh)
        choices = [small.choose(index, outcome.state).sharding for index in range(len(small.op_slots))]
        state = list(space.whole)
        for slot, value in self.folded.value_of.items():
            state[slot] = space.number(small.shardings[outcome.state[value]])
        pinned = {space.slot_of[value] for value in outcome.setup.pins}
        free_loose_values(space, state, pinned)
        ops: list[OpSharding | None] = [None] * len(space.op_slots)
        for own, choice in zip(self.folded.members, choices, strict=True):
            for index in own:
                ops[index] = choice
        rest = [own if own is not None else space.choose(index, state).sharding for index, own in enumerate(ops)]
        return Assignment(tuple(rest), tuple([space.shardings[state[slot]] for slot in space.slot_of]), MODE)


def _prepare(graph: Graph, request: Request) -> tuple[Setup, bool]:
    """The set-up on one axis per round; on the user's own axes where he has any, which are then not joined either."""
    if request.mesh is not None or request.manual or any(pin.mesh_axes for pin in request.value_pins):
        return prepare(graph, request), False
    try:
        return prepare(graph, replace(request, mesh=round_mesh(request.num_devices))), True
    except StrategyError:
        return prepare(graph, request), False


def _without(sharding: TensorSharding, axes: AxisNames) -> TensorSharding:
    return tuple([tuple([name for name in names if name not in axes]) for names in sharding])


def _same(mesh: LogicalMesh) -> dict[str, tuple[str, AxisNames]]:
    return {name: (name, (name,)) for name in mesh.names}


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
