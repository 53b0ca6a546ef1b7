"""The solver's problem for a network on one mesh, and the assignment that a solution of it stands for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np

from spmdctx.errors import UnsupportedError
from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.ir.domain import axis_codes, domain
from spmdctx.ir.graph import Op, item_bytes
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.rule import FactorKind
from spmdctx.ir.sharding import Assignment, OpSharding, TensorSharding
from spmdctx.machine.reshard_table import reshard_table
from spmdctx.machine.xla.collectives.turning import turned_table
from spmdctx.machine.xla.narrowing import NARROW_BYTES
from spmdctx.search.problem.choices import Alike, Choices, EdgeChoices
from spmdctx.search.problem.coupled import allowed_alone, allowed_pairs
from spmdctx.search.problem.network import Carry, Load, Network, Node, Source
from spmdctx.search.problem.space import Space
from spmdctx.search.problem.states import OpSplits, ResultUse, following, shapes_of, split_of_axes, split_of_rule, states_of
from spmdctx.search.setup.limits import AlgoLimits, is_elementwise
from spmdctx.search.setup.marks import PinnedDims
from spmdctx.search.setup.request import Coupling, Setup
from spmdctx.search.solver.problem.problem import Edge, Problem


class Tables:
    """The choices of each node and the problem, for one mesh (that of the space)."""

    def __init__(self, network: Network, space: Space, setup: Setup, limits: AlgoLimits) -> None:
        self.network, self.space, self.forced, self._limits = network, space, setup.forced, limits
        self._unscattered = setup.unscattered
        self._couplings = self._coupled_nodes(setup.couplings if type(space.mesh) is LogicalMesh else ())
        self.pins: dict[int, PinnedDims] = {space.slot_of[value]: dims for value, dims in setup.partial_pins.items()}
        self.pins.update({space.slot_of[value]: sharding for value, sharding in setup.pins.items()})
        self._outputs, self._passing = frozenset(space.graph.outputs), space.passing
        self._memo: dict[tuple[object, ...], Choices] = {}
        self._edges: dict[tuple[object, ...], FloatArray] = {}
        self._reshard_s: dict[tuple[object, ...], FloatArray] = {}
        self._turned_s: dict[tuple[int, ...], FloatArray] = {}
        self.choices = Alike().of([self.choices_of(node) for node in network.nodes])

    def problem(self) -> Problem:
        """Builds the problem without memory."""
        known, edges, choices = dict[tuple[int, int, int], FloatArray](), list[Edge](), self.choices
        for kind, (carry, load) in zip(self.network.edge_kinds, self.network.carries.items(), strict=True):
            left, right = carry.source.node, carry.target
            key = kind, id(choices[left]), id(choices[right])
            table = known.get(key)
            if table is None:
                table = known[key] = self.table(carry, load)
            edges.append(Edge(left, right, table))
        return without_loops(self.costs(), [*edges, *self.coupled()])

    def costs(self) -> list[FloatArray]:
        """Returns the seconds of each node's states, without edges."""
        known, costs = dict[tuple[int, int], FloatArray](), list[FloatArray]()
        for choices, node in zip(self.choices, self.network.nodes, strict=True):
            key = id(choices), node.weight
            own = known.get(key)
            if own is None:
                own = known[key] = choices.seconds * node.weight
            costs.append(own)
        return costs

    def coupled(self) -> list[Edge]:
        """Returns the tables of coupled nodes; a node that is coupled alone has an edge to itself."""
        edges = []
        for (left, right), coupling in self._couplings.items():
            shape = self.space.graph.values[coupling.value].shape
            own, other = (self.choices[node].stored[0] for node in (left, right))
            if left == right:
                edges.append(Edge(left, left, np.diag(allowed_alone(self.space.mesh, shape, own, coupling.dim))))
            else:
                edges.append(Edge(left, right, allowed_pairs(self.space.mesh, shape, own, other, coupling)))
        return edges

    def _coupled_nodes(self, couplings: Iterable[Coupling]) -> dict[tuple[int, int], Coupling]:
        """Returns the pairs of nodes that are coupled; values that the search does not place have none."""
        found = {}
        for coupling in couplings:
            slots = [self.space.slot_of[value] for value in (coupling.parameter, coupling.value)]
            nodes = [self.network.slot_nodes.get(self.network.folded.slot_class[slot], -1) for slot in slots]
            if min(nodes) >= 0 and (coupling.how == "itself" or nodes[0] != nodes[1]):
                found[nodes[0], nodes[1]] = coupling
        return found

    def choices_of(self, node: Node) -> Choices:
        """Returns the choices of a node; a subclass that searches fewer may narrow them."""
        if node.sort == "op":
            return self._op_choices(node)
        value = self.space.graph.values[node.member]
        pin = self.pins.get(self.space.slot_of[node.member]) if node.sort == "slot" else None
        key = (node.sort, value.shape, pin, node.joins.hands_on)
        known = self._memo.get(key)
        if known is None:
            numbers, bits = self._numbers(value.shape, pin), None
            if node.joins.hands_on:
                numbers, bits = self._with_partial(value.shape, numbers)
            known = self._memo[key] = Choices((numbers,), (numbers,), np.zeros(len(numbers)), unreduced=bits)
        return known

    def _with_partial(self, shape: tuple[int, ...], numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the shardings of a slot that may be handed on unreduced, and for each the axes over which it is unreduced.

        They are no axes, or any along which the slot is not split.
        """
        codes = axis_codes(self.space.mesh)
        used = np.bitwise_or.reduce(codes.bits[domain(self.space.mesh, shape).rows[numbers]], axis=1, initial=0)
        subsets = range(1 << len(codes.units))
        kept = [numbers[used & bits == 0] for bits in subsets]
        return np.concatenate(kept), np.repeat(np.array(subsets, dtype=np.int64), [len(own) for own in kept])

    def _numbers(self, shape: tuple[int, ...], pin: PinnedDims | None) -> IntArray:
        """Returns the shardings of a slot or use: all of its domain, or those that agree with a pin."""
        known = domain(self.space.mesh, shape)
        kept = np.ones(len(known), dtype=bool)
        for dim, own in enumerate(pin or ()):
            if own is not None:
                kept &= known.rows[:, dim] == known.codes.code(own)
        if not kept.any():
            raise UnsupportedError(
                f"The search cannot keep the sharding {pin} of a value of shape {shape}.",
                need="splits that divide, and on meshes of more than three axes axes in the order of the mesh",
            )
        return np.nonzero(kept)[0]

    def _op_choices(self, node: Node) -> Choices:
        space, op = self.space, self.space.graph.ops[node.member]
        shapes = shapes_of(space.graph, op)
        forced = self.forced.get(op.id)
        later = node.later if self._unscattered.isdisjoint(op.results) else node.later._replace(scatters=False)
        key = (space.kind_of[op.id], forced, node.joins, node.terminal, later)
        known = self._memo.get(key)
        if known is None:
            if forced is None:
                split = self.allowed_splits(op, split_of_rule(op, shapes, space.splittable(op.rule), space.mesh))
            else:
                split = split_of_axes(op, shapes, forced, space.mesh)
            states = states_of(space.graph, op, split, node.joins, space.mesh, space.topology, ResultUse(node.terminal, later))
            if forced is None and self._limits.elementwise_follow:
                states = following(states, self._leaders(op))
            known = self._memo[key] = Choices(states.stored, states.wanted, states.seconds, split, states)
        return known

    def allowed_splits(self, op: Op, split: OpSplits) -> OpSplits:
        """Returns the splits that the search's parameters allow."""
        if not self._limits.restricts:
            return split
        codes = axis_codes(self.space.mesh)
        kept = [place for place, row in enumerate(split.rows.tolist()) if self._limits.allows(op, codes.sharding(row), self.space.mesh)]
        places = np.array(kept, dtype=np.int64)
        operands, results = (tuple(own[places] for own in side) for side in (split.operands, split.results))
        return OpSplits(split.rows[places], operands, results)

    def _leaders(self, op: Op) -> list[int]:
        """Lists the operands that an element-wise op may follow; it must follow one of them, unless the list is empty."""
        if not is_elementwise(op.rule):
            return []
        slots, free = self.space.op_slots[op.id], self.space.free_slots
        alike = [place for place, dims in enumerate(op.rule.operands) if dims and dims == op.rule.results[0]]
        return [] if any(slots[place] in free for place in alike) else alike

    def among(self, kept: Sequence[IntArray]) -> Tables:
        """Returns the tables of only some states of each node, given by their places."""
        other = copy(self)
        known: dict[tuple[int, bytes], Choices] = {}
        pairs = zip(self.choices, kept, strict=True)
        keys = [(id(choices), places.tobytes()) for choices, places in pairs]
        for key, choices, places in zip(keys, self.choices, kept, strict=True):
            if key not in known:
                known[key] = choices.among(places)
        other.choices, other._edges = [known[key] for key in keys], {}
        return other

    def table(self, carry: Carry, load: Load, ends: EdgeChoices | None = None) -> FloatArray:
        """Returns the seconds of an edge for each pair of states of the nodes at its ends, or of `ends` in their places."""
        source, target = ends or EdgeChoices(self.choices[carry.source.node], self.choices[carry.target])
        stored, taken = source.stored[carry.source.result], target.taken[carry.position]
        weight, times, value = load
        known = self.space.graph.values[value]
        given, asked = source.given, target.asked
        unreduced = any(bits is not None and bool(bits.any()) for bits in (given, asked))
        size, written = NARROW_BYTES if carry.narrow else item_bytes(known.dtype), self._passing[value] * item_bytes(known.dtype)
        follows = target.states is not None and bool((target.states.follows == carry.position).any())
        is_kept = self.network.summed.keeps(value, is_made=self.network.nodes[carry.source.node].sort == "op")
        reduction = self._reduction(carry.source, source)
        is_turned = (
            self.space.topology.compiler.turns_gathers and source.split is not None and target.split is None and value in self._outputs
        )
        key = (
            id(stored),
            id(taken),
            known.shape,
            size,
            weight,
            times,
            (id(given), id(asked)) if unreduced else None,
            (carry.position, id(target.states)) if follows else None,
            reduction,
            is_kept,
            written,
            is_turned,
        )
        table = self._edges.get(key)
        if table is None:
            # Weighting comes first, while the table is small. Columns are taken before rows, so that rows are then copied whole.
            table = (self.reshard_s(known.shape, size) * weight).take(taken, axis=1).take(stored, axis=0)
            if written:
                table += self._written_s(known.shape, written, stored, taken) * times
            if is_turned:
                table += self._turning_s(known.shape).take(taken, axis=1).take(stored, axis=0) * (times * item_bytes(known.dtype))
            if unreduced:
                table = self._with_unreduced(table, source, target, stored, taken)
            if reduction is not None and target.split is None:
                table = self._with_reductions(table, carry.source, source, known.shape, taken)
            if is_kept:
                table = self._without_slices(table, known.shape, stored, taken)
            if follows and target.states is not None:
                table = np.where((target.states.follows == carry.position) & (stored[:, None] != taken[None, :]), np.inf, table)
            self._edges[key] = table
        return table

    def _reduction(self, made: Source, source: Choices) -> tuple[object, ...] | None:
        """Returns that on which the reduction of a result depends, beside its sharding; None if the result is not reduced."""
        node = self.network.nodes[made.node]
        if source.split is None or source.states is None:
            return None
        op = self.space.graph.ops[node.member]
        is_sum = op.rule.combiner == "add" and (node.joins.takes or FactorKind.REDUCTION in op.rule.kinds)
        return (made.result, id(source.split), id(source.states.split), op.rule.kinds, op.primitive) if is_sum else None

    @staticmethod
    def _with_unreduced(table: FloatArray, source: Choices, target: Choices, stored: IntArray, taken: IntArray) -> FloatArray:
        """Forbids that an unreduced value goes to a target that takes it over other axes, or in another sharding."""
        given = np.zeros(len(stored), dtype=np.int64) if source.given is None else source.given
        asked = np.zeros(len(taken), dtype=np.int64) if target.asked is None else target.asked
        misfit = given[:, None] != asked[None, :]
        misfit |= (given[:, None] != 0) & (stored[:, None] != taken[None, :])
        return np.where(misfit, np.inf, table)

    def _without_slices(self, table: FloatArray, shape: tuple[int, ...], stored: IntArray, taken: IntArray) -> FloatArray:
        """Forbids slices of sums in loops: the reduction splits such a sum in every iteration, or nothing does."""
        codes = axis_codes(self.space.mesh)
        used = np.bitwise_or.reduce(codes.bits[domain(self.space.mesh, shape).rows], axis=1, initial=0)
        return np.where(used[taken][None, :] & ~used[stored][:, None], np.inf, table)

    def _with_reductions(self, table: FloatArray, made: Source, source: Choices, shape: tuple[int, ...], stored: IntArray) -> FloatArray:
        """Forbids stores that lowering does not reach from the state of a partial result (`reductions.reduction_plan`).

        XLA scatters sums of unreduced terms, so these go only into the split in which they are stored.
        """
        op = self.space.graph.ops[self.network.nodes[made.node].member]
        assert source.split is not None
        assert source.states is not None
        natural = source.split.results[made.result]
        codes, rows = axis_codes(self.space.mesh), domain(self.space.mesh, shape).rows
        summed = [factor for factor, kind in enumerate(op.rule.kinds) if kind is FactorKind.REDUCTION]
        own = np.bitwise_or.reduce(codes.bits[source.split.rows[:, summed]], axis=1, initial=0)[source.states.split]
        before = rows[natural[source.states.split]]
        after = rows[source.stored[made.result]]
        changed = np.nonzero((own != 0) | (before != after).any(axis=1))[0]
        if not len(changed) or op.rule.combiner != "add":
            return table
        own, before, after = own[changed], before[changed], after[changed]
        fits = np.ones((len(changed), len(stored)), dtype=bool)
        is_planned, pending = own != 0, np.ones_like(fits)
        for dim, target in enumerate(rows[stored].T):
            more = codes.added[before[:, dim]][:, target]
            some = (op.primitive == "dot_general") & (before[:, dim] == 0)
            scatters = (more != 0) & (more & ~own[:, None] == 0) & ((more == own[:, None]) | some[:, None])
            now = pending & scatters
            pending &= ~scatters
            planned = np.where(now, target[None, :], before[:, dim, None]) == after[:, dim, None]
            sliced = (before[:, dim] == after[:, dim])[:, None] | (target[None, :] == after[:, dim, None])
            fits &= np.where(is_planned[:, None], planned, sliced)
        table = table.copy()
        table[changed] = np.where(fits, table[changed], np.inf)
        return table

    def reshard_s(self, shape: tuple[int, ...], size: int) -> FloatArray:
        """Returns the seconds from each sharding of a shape to each, with `size` bytes per element."""
        key = (shape, size)
        known = self._reshard_s.get(key)
        if known is None:
            table = reshard_table(domain(self.space.mesh, shape), self.space.topology)
            known = self._reshard_s[key] = table.fixed_s + table.s_per_byte * (size * math.prod(shape))
        return known

    def _turning_s(self, shape: tuple[int, ...]) -> FloatArray:
        if shape not in self._turned_s:
            self._turned_s[shape] = turned_table(shape, self.space.mesh, self.space.topology)
        return self._turned_s[shape]

    def _written_s(self, shape: tuple[int, ...], size: int, stored: IntArray, taken: IntArray) -> FloatArray:
        """Returns `roofline.written_s` for a value that is only computed on the way and changes its sharding."""
        slices = domain(self.space.mesh, shape).slices[stored]
        seconds = 2 * size * math.prod(shape) / slices / self.space.topology.memory_bytes_per_s
        return np.where(stored[:, None] != taken[None, :], seconds[:, None], 0.0)

    def assignment(self, states: tuple[int, ...], mode: str) -> Assignment:
        """Translates a choice of states to shardings of every op and value; values that are free to place are left whole."""
        space, folded = self.space, self.network.folded
        graph, mesh = space.graph, space.mesh
        # Equal shardings share one object, by which their prices are memoised.
        same: dict[OpSharding, OpSharding] = {}
        chosen = [self._op_sharding(node, states[node]) for node in range(len(folded.op_members))]
        shardings = [same.setdefault(own, own) for own in chosen]
        ops = []
        values: list[TensorSharding] = [space.shardings[space.whole[value.id]] for value in graph.values]
        for slot, dims in self.pins.items():
            # A value that no op reads is no part of the search, but lies where the user wants it.
            values[slot] = tuple([own or () for own in dims])
        for slot_class, node in self.network.slot_nodes.items():
            member = folded.slot_members[slot_class][0]
            number = int(self.choices[node].stored[0][states[node]])
            own = domain(mesh, graph.values[member].shape).shardings[number]
            for slot in folded.slot_members[slot_class]:
                values[slot] = own
        values = [values[slot if folded.slot_class[slot] >= 0 else value] for value, slot in enumerate(space.slot_of)]
        for op, node in zip(graph.ops, folded.op_class, strict=True):
            ops.append(shardings[node] if node >= 0 else OpSharding(((),) * len(op.rule.sizes)))
            if node >= 0 and self.network.nodes[node].joins.takes:
                (value,) = op.results
                values[value] = self._stored_sum(value, node, states)
        return Assignment(tuple(ops), tuple(values), mode)

    def _op_sharding(self, node: int, state: int) -> OpSharding:
        choices = self.choices[node]
        assert choices.split is not None
        assert choices.states is not None
        row = choices.split.rows[choices.states.split[state]].tolist()
        return OpSharding(axis_codes(self.space.mesh).sharding(row))

    def _stored_sum(self, value: int, node: int, states: tuple[int, ...]) -> TensorSharding:
        """Returns the sharding of a result that may be a sum of unreduced terms.

        If all readers slice the sum, it is left as the reduction makes it, and they slice it.
        """
        choices, state, network = self.choices[node], states[node], self.network
        assert choices.split is not None
        assert choices.states is not None
        slot_class = network.folded.slot_class[self.space.slot_of[value]]
        slot_node = network.slot_nodes[slot_class]
        number = int(self.choices[slot_node].stored[0][states[slot_node]])
        as_left = number == int(choices.stored[0][state])
        if choices.states.unreduced_in[state] and as_left and slot_class not in network.fixed_slots and value not in self._outputs:
            number = int(choices.split.results[0][choices.states.split[state]])
        return domain(self.space.mesh, self.space.graph.values[value].shape).shardings[number]


def without_loops(costs: Sequence[FloatArray], edges: Iterable[Edge]) -> Problem:
    """Returns a problem; edges from a node to itself join the costs of its states."""
    own, kept = list(costs), []
    for edge in edges:
        if edge.left == edge.right:
            own[edge.left] = own[edge.left] + np.diagonal(edge.table)
        else:
            kept.append(edge)
    return Problem(tuple(own), tuple(kept))
