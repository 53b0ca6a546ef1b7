"""exhaustive: the cheapest assignment of a small graph among all there are; the truth that searches are tested against.

Variables are the split of every op, the place of every slot (the sharding it is stored in, or the way in which it is kept unreduced),
and the sharding through which several matrix products of a computation read one value. Every legal value of each takes part. The
objective of `evaluate` is a sum of tables over few variables, which `elimination` minimises over all of their values. With a memory
budget, choices are tried in the order of their cost until one fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import NamedTuple

import numpy as np

from spmdctx.cost.evaluate import Eligible, all_shardings, candidates_gather_s, leads_to, moved_bytes, reductions, sharing_ids, tied_with
from spmdctx.cost.memory.lives import compiled_memory, profile
from spmdctx.cost.price import price
from spmdctx.cost.roofline import compute_time_s, passing_values, written_s
from spmdctx.cost.step import Step
from spmdctx.ir.analysis.loop_sums import AT_ONCE, Summed, later_reductions, loop_sums
from spmdctx.ir.analysis.repeats import made_repeats, read_repeats
from spmdctx.ir.arrays import FloatArray
from spmdctx.ir.graph import LITERAL, Graph, Op, Value, item_bytes
from spmdctx.ir.mesh import LogicalMesh, axes_of, replicated
from spmdctx.ir.primitives import ADDITIONS
from spmdctx.ir.projection import FactorAxes, local_bytes, partial_axes, project
from spmdctx.ir.rule import FactorKind, OpRule
from spmdctx.ir.sharding import Assignment, OpSharding, TensorSharding
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.reshard import reshard_time_s
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.collectives.turning import turned_s
from spmdctx.machine.xla.memory.on_chip import OnChip
from spmdctx.machine.xla.narrowing import kept_share
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.machine.xla.reductions import scattered_by
from spmdctx.search.setup.limits import AlgoLimits, is_elementwise
from spmdctx.search.setup.marks import PinnedDims
from tests.oracles.exhaustive_tables import Elimination

MODE = "exhaustive"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the assignment must keep to.

    Attributes:
        pins: per value the axes of its dimensions, None for those that are free.
        forced: ops whose split is fixed.
        limits: parameters of the search.
        memory_bytes: budget per device for the peak of what is stored, None for none.
        count_copies: whether the budget is for the safe end of the whole peak that `price` predicts, with the copies that are made on
            the way.
        donated: input values whose memory the step may reuse.
    """

    pins: Mapping[int, PinnedDims] = field(default_factory=dict)
    forced: Mapping[int, FactorAxes] = field(default_factory=dict)
    limits: AlgoLimits = field(default_factory=AlgoLimits)
    memory_bytes: int | None = None
    count_copies: bool = False
    donated: frozenset[int] = frozenset()


class Optimum(NamedTuple):
    """The cheapest assignment and its seconds."""

    assignment: Assignment
    cost_s: float


class Place(NamedTuple):
    """Where a slot is: its sharding, and the axes over which it is still unreduced.

    The compiler scatters a sum of unreduced terms that is stored as it is made, if its readers take slices; they read it `scattered`.
    """

    sharding: TensorSharding
    unreduced: frozenset[str] = frozenset()
    scattered: TensorSharding | None = None

    @property
    def source(self) -> TensorSharding:
        """The sharding in which readers get it."""
        return self.sharding if self.scattered is None else self.scattered

    def serves(self, wanted: TensorSharding) -> bool:
        """Whether a reader may take it in a sharding; none gathers what is scattered for it."""
        return self.scattered is None or {*axes_of(self.scattered)} <= {*axes_of(wanted)}


class Way(NamedTuple):
    """How an op is done: its split, and the axes over which it takes its operands unreduced."""

    axes: FactorAxes
    unreduced: frozenset[str] = frozenset()


def exhaustive(
    graph: Graph,
    scopes: Sequence[int],
    from_literals: frozenset[int],
    mesh: LogicalMesh,
    topology: Topology,
    conditions: Conditions | None = None,
) -> Optimum | None:
    """The cheapest of all assignments, None where none fits the memory.

    Args:
        graph: a small step.
        scopes: per op the computation that it belongs to.
        from_literals: values that depend on no input.
        mesh: the mesh.
        topology: the machine.
        conditions: pins, limits and memory.

    Raises:
        UnsupportedError: the graph is too large to try everything.
    """
    return _Everything(graph, scopes, from_literals, mesh, topology, conditions or Conditions()).best()


def all_splits(rule: OpRule, mesh: LogicalMesh) -> list[FactorAxes]:
    """Every legal split of a rule's factors, axes in every order; a minor factor only where the major ones are split completely."""
    names = [name for name, size in mesh.axes if size > 1]
    every = [own for count in range(len(names) + 1) for own in permutations(names, count)]
    found: list[FactorAxes] = [()]
    for size, may_split in zip(rule.sizes, rule.splittable, strict=True):
        fitting = [own for own in every if not own or (may_split and size % mesh.num_slices(own) == 0)]
        found = [(*axes, own) for axes in found for own in fitting if not {*own} & {name for one in axes for name in one}]
    return [axes for axes in found if _is_contiguous(rule, axes, mesh)]


def _is_contiguous(rule: OpRule, axes: FactorAxes, mesh: LogicalMesh) -> bool:
    for dims in (*rule.operands, *rule.results):
        for factors in dims:
            for major, minor in combinations(factors, 2):
                if axes[minor] and mesh.num_slices(axes[major]) != rule.sizes[major]:
                    return False
    return True


class _Everything:
    def __init__(
        self,
        graph: Graph,
        scopes: Sequence[int],
        from_literals: frozenset[int],
        mesh: LogicalMesh,
        topology: Topology,
        conditions: Conditions,
    ) -> None:
        self.graph, self.scopes, self.from_literals = graph, scopes, from_literals
        self.mesh, self.topology, self.conditions = mesh, topology, conditions
        self.free = tied_with(graph, from_literals)
        tied = {value for pair in graph.ties for value in pair}
        self.slot_of = [min(tied_with(graph, frozenset({own.id}))) if own.id in tied else own.id for own in graph.values]
        self.ops = [op for op in graph.ops if not op.results or any(value not in self.free for value in op.results)]
        self.pinned = tied_with(graph, frozenset(conditions.pins))
        self.overlap, self.passing = overlap_candidates(graph), passing_values(graph)
        sums = loop_sums(graph)
        self.later, self.summed = later_reductions(graph, sums), Summed.of(sums)
        self.moved_bytes = moved_bytes(graph, topology)
        self.memory = compiled_memory(graph, scopes, conditions.donated, topology.compiler, is_split=mesh.num_devices > 1)
        self.sums = self._sums()
        self.places: dict[int, list[Place]] = {}
        self.ways: dict[int, list[Way]] = {op.id: self._ways(op) for op in self.ops}
        self.sharing = sharing_ids(graph)
        self.uses: dict[tuple[int, int], list[TensorSharding]] = {}
        self.tables = Elimination()
        self.memo: dict[tuple[object, ...], FloatArray] = {}

    def best(self) -> Optimum | None:
        used = sorted({value for op in self.ops for value in (*op.operands, *op.results)} - self.free - {LITERAL})
        for slot in sorted({self.slot_of[value] for value in used}):
            self.places[slot] = self._places(slot)
            self.tables.add_variable(("slot", slot), len(self.places[slot]))
        self._add_uses()
        for op in self.ops:
            self._add_op(op)
        budget = self.conditions.memory_bytes
        if budget is None:
            cost_s, values = self.tables.least()
            return Optimum(self._assignment(values), cost_s) if np.isfinite(cost_s) else None
        slots = [("slot", slot) for slot in self.places]
        stored = self._profiles()
        # As much of the small and short-lived may be on the chip.
        most = budget + self.topology.compiler.scratch_bytes
        for cost_s, values in self.tables.in_order(slots, lambda chosen: _least_peak(stored, chosen) <= most):
            assignment = self._assignment(values)
            if self._peak_bytes(assignment) <= budget:
                return Optimum(assignment, cost_s)
        return None

    def _peak_bytes(self, assignment: Assignment) -> int:
        """Bytes alive at the peak: what is stored, and if the conditions count them the copies that are made on the way."""
        donated = self.conditions.donated
        if not self.conditions.count_copies:
            pairs = zip(self.graph.values, assignment.values, strict=True)
            sizes = [int(local_bytes(known, own, self.mesh) * self._share(known)) for known, own in pairs]
            return int(
                profile(
                    self.memory.lives, sizes, len(self.graph.ops), (), OnChip.of(self.topology.compiler.scratch_bytes, self.topology.device)
                ).max()
            )
        return price(Step(self.graph, self.scopes, self.from_literals), assignment, self.mesh, self.topology, donated).safe_bytes

    def _share(self, value: Value) -> float:
        """The part of its own bytes that a value takes in memory."""
        return kept_share(value, self.memory.narrow, self.topology)

    def _profiles(self) -> dict[object, FloatArray]:
        """Per slot, the bytes of its values at every op for each of its places. [places, ops]"""
        alive: dict[int, FloatArray] = {}
        for value, start, end in self.memory.lives:
            slot = self.slot_of[value]
            if slot in self.places:
                alive.setdefault(slot, np.zeros(len(self.graph.ops)))[start : end + 1] += self._share(self.graph.values[value])
        found: dict[object, FloatArray] = {}
        for slot, times in alive.items():
            sizes = [local_bytes(self.graph.values[slot], place.sharding, self.mesh) for place in self.places[slot]]
            found["slot", slot] = np.outer(sizes, times)
        return found

    def _sums(self) -> frozenset[int]:
        """Values that can be kept unreduced: terms of an addition that only it reads."""
        if not self.topology.compiler.merges_partial_sums:
            return frozenset()
        eligible = Eligible(self.graph, self.free, self.pinned).values
        terms: set[int] = set()
        for op in self.ops:
            if op.primitive in ADDITIONS and LITERAL not in op.operands and op.operands[0] != op.operands[1]:
                terms.update(value for value in op.operands if eligible[value] and value in self.graph.producers)
        return frozenset(value for value in terms if self._can_be_partial(self.graph.ops[self.graph.producers[value]]))

    def _can_be_partial(self, op: Op) -> bool:
        direct = op.primitive != "gather" or self.topology.compiler.sinks_slices
        reduces = op.primitive in ADDITIONS or FactorKind.REDUCTION in op.rule.kinds
        return direct and reduces and op.rule.combiner == "add" and len(op.results) == 1

    def _places(self, slot: int) -> list[Place]:
        known = all_shardings(self.graph.values[slot].shape, self.mesh)
        pins = [pin for value, pin in self.conditions.pins.items() if self.slot_of[value] == slot]
        found = [Place(one) for one in known if all(_agrees(one, pin) for pin in pins)]
        if slot in self.sums:
            for axes in self._subsets():
                found += [Place(one, axes) for one in known if not axes & {name for own in one for name in own}]
        return found + self._scattered(slot)

    def _scattered(self, slot: int) -> list[Place]:
        """Places of a sum that is scattered to its readers; not of what the step returns, nor of what is tied or pinned."""
        maker = self.graph.producers.get(slot)
        tied = {value for pair in self.graph.ties for value in pair}
        if maker is None or slot in {*tied, *self.pinned, *self.graph.outputs}:
            return []
        op = self.graph.ops[maker]
        found: dict[Place, None] = {}
        for way in self.ways[op.id]:
            if way.unreduced:
                natural = project(op.rule.results[0], way.axes)
                found |= {Place(natural, scattered=after): None for after, _ in self._reduced(op, slot, natural, way) if after != natural}
        return list(found)

    def _subsets(self) -> list[frozenset[str]]:
        names = [name for name, size in self.mesh.axes if size > 1]
        return [frozenset(own) for count in range(1, len(names) + 1) for own in combinations(names, count)]

    def _add_uses(self) -> None:
        """A variable for every value that is read for several matrix products of one computation."""
        readers: dict[tuple[int, int], list[Op]] = {}
        for op in self.ops:
            if op.id in self.sharing:
                for value in op.operands:
                    if value != LITERAL and value not in self.free:
                        readers.setdefault((value, self.scopes[op.id]), []).append(op)
        for (value, scope), ops in readers.items():
            if len(ops) > 1:
                shardings = self.uses[value, scope] = list(all_shardings(self.graph.values[value].shape, self.mesh))
                self.tables.add_variable(("use", value, scope), len(shardings))
                slot = self.slot_of[value]
                places = self.places[slot]
                table = self._moves(ops[0], value, [place.source for place in places], shardings)
                table[[[not place.serves(one) for one in shardings] for place in places]] = np.inf
                self.tables.add_table((("slot", slot), ("use", value, scope)), table * ops[0].repeats)

    def _add_op(self, op: Op) -> None:
        ways = self.ways[op.id]
        me = ("op", op.id)
        self.tables.add_variable(me, len(ways))
        seconds = [compute_time_s(self.graph, op, way.axes, self.mesh, self.topology) for way in ways]
        self.tables.add_table((me,), np.array(seconds) * op.repeats)
        for position, value in enumerate(op.operands):
            if value != LITERAL and value not in self.free:
                self._add_operand(op, position, value)
        for position, value in enumerate(op.results):
            natural = [project(op.rule.results[position], way.axes) for way in ways]
            if value in self.free:
                alone = [min(seconds for _, seconds in self._reduced(op, value, one, way)) for one, way in zip(natural, ways, strict=True)]
                self.tables.add_table((me,), np.array(alone) * op.repeats)
                continue
            slot = self.slot_of[value]
            rows = [self._result_row(op, value, one, way) for one, way in zip(natural, ways, strict=True)]
            self.tables.add_table((me, ("slot", slot)), np.array(rows) * made_repeats(self.graph, op))
        if self.conditions.limits.elementwise_follow and op.id not in self.conditions.forced:
            self._add_following(op)

    def _ways(self, op: Op) -> list[Way]:
        if op.id in self.conditions.forced:
            return [Way(self.conditions.forced[op.id])]
        limits = self.conditions.limits
        ways = [Way(axes) for axes in all_splits(op.rule, self.mesh) if limits.allows(op, axes, self.mesh)]
        if op.primitive in ADDITIONS and all(value in self.sums for value in op.operands):
            for way in list(ways):
                own = {name for names in way.axes for name in names}
                ways += [Way(way.axes, axes) for axes in self._subsets() if not axes & own]
        return ways

    def _add_operand(self, op: Op, position: int, value: int) -> None:
        ways, dims = self.ways[op.id], op.rule.operands[position]
        wanted = [project(dims, way.axes) for way in ways]
        key = (value, self.scopes[op.id])
        if op.id in self.sharing and key in self.uses:
            self.tables.add_table((("use", *key), ("op", op.id)), self._moves(op, value, self.uses[key], wanted) * op.repeats)
            return
        places = self.places[self.slot_of[value]]
        table = self._moves(op, value, [place.source for place in places], wanted) * read_repeats(self.graph, op)
        for row, place in enumerate(places):
            for column, way in enumerate(ways):
                taken = way.unreduced if value in self.sums else frozenset()
                if place.unreduced != taken or (taken and place.sharding != wanted[column]) or not place.serves(wanted[column]):
                    table[row, column] = np.inf
        self.tables.add_table((("slot", self.slot_of[value]), ("op", op.id)), table)

    def _result_row(self, op: Op, value: int, natural: TensorSharding, way: Way) -> list[float]:
        """Seconds per place of the result's slot."""
        own = partial_axes(op.rule, way.axes)
        partial = way.unreduced | {*own}
        ways = list(self._reduced(op, value, natural, way))
        row = []
        for place in self.places[self.slot_of[value]]:
            if place.unreduced:
                row.append(0.0 if (natural, partial) == place[:2] else float("inf"))
            elif place.scattered is not None:
                here = [seconds for after, seconds in ways if way.unreduced and (natural, after) == (place.sharding, place.scattered)]
                row.append(min(here, default=float("inf")))
            else:
                fitting = [one for one in ways if leads_to(op, own, natural, one[0], place.sharding)]
                size = self.moved_bytes[op.id, value]
                row.append(min(seconds + self._reshard(value, after, place.sharding, size, is_made=True) for after, seconds in fitting))
        return row

    def _reduced(self, op: Op, value: int, natural: TensorSharding, way: Way) -> Iterator[tuple[TensorSharding, float]]:
        """Where a result can be once it is reduced, and the seconds of that."""
        own = partial_axes(op.rule, way.axes)
        partial = own or tuple(name for name in self.mesh.names if name in way.unreduced)
        if not partial:
            yield natural, 0.0
            return
        known, mesh, topology = self.graph.values[value], self.mesh, self.topology
        exposed = 1.0 - self.overlap.reduction_share(value, topology)
        payload = local_bytes(known, natural, mesh)
        if op.rule.combiner in ("argmax", "argmin"):
            yield natural, candidates_gather_s(self.graph, op, value, payload, partial, mesh, topology) * exposed
            return
        machine = self.overlap.reduction_machine(value, topology)
        wide = self.overlap.widening(op, value, known.dtype, topology)
        payload, size = payload * wide, item_bytes(known.dtype) * wide
        for after, scattered, reduced in reductions(op, known.shape, natural, partial, mesh):
            kind = scattered_by(known.shape, size, own, natural, after, mesh, topology) if scattered else ""
            seconds = collective_time_s(kind, payload, scattered, mesh, machine) if scattered else 0.0
            left = payload // mesh.num_slices(scattered)
            later = AT_ONCE if scattered else self.later.get(value, AT_ONCE)
            whole = round(left * later.size)
            seconds += collective_time_s("all_reduce", whole, reduced, mesh, machine) * later.times if reduced else 0.0
            yield after, seconds * exposed

    def _add_following(self, op: Op) -> None:
        """An element-wise op takes one of the operands that look like its result as it is stored."""
        if not is_elementwise(op.rule):
            return
        leaders = [value for value, dims in zip(op.operands, op.rule.operands, strict=True) if dims and dims == op.rule.results[0]]
        slots = sorted({self.slot_of[value] for value in leaders})
        # A value that is free to place can be followed wherever the op goes.
        if not leaders or any(value in self.free for value in leaders):
            return
        ways = self.ways[op.id]
        wanted = [project(op.rule.results[0], way.axes) for way in ways]
        fits = np.zeros((len(ways), *(len(self.places[slot]) for slot in slots)), dtype=bool)
        for number, slot in enumerate(slots):
            same = np.array([[one == place.sharding for place in self.places[slot]] for one in wanted])
            fits |= same.reshape(len(ways), *(len(self.places[slot]) if other == number else 1 for other in range(len(slots))))
        self.tables.add_table((("op", op.id), *(("slot", slot) for slot in slots)), np.where(fits, 0.0, np.inf))

    def _moves(self, op: Op, value: int, sources: Sequence[TensorSharding], targets: Sequence[TensorSharding]) -> FloatArray:
        """Seconds in which `op` is brought a value from each source to each target."""
        known, size = self.graph.values[value], self.moved_bytes[op.id, value]
        kept = self.summed.keeps(value, is_made=False)
        key = (known.shape, known.dtype, size, self.overlap.weights[value], self.passing[value], kept, tuple(sources), tuple(targets))
        if key not in self.memo:
            self.memo[key] = np.array([[self._reshard(value, source, target, size) for target in targets] for source in sources])
        return self.memo[key].copy()

    def _reshard(self, value: int, source: TensorSharding, target: TensorSharding, size: int = 0, is_made: bool = False) -> float:
        if source == target:
            return 0.0
        if self.summed.keeps(value, is_made=is_made) and not {*axes_of(source)} >= {*axes_of(target)}:
            return float("inf")
        known, exposed = self.graph.values[value], 1.0 - self.overlap.gather_share(value, self.topology)
        seconds = exposed * reshard_time_s(known.shape, size or item_bytes(known.dtype), source, target, self.mesh, self.topology)
        if self.passing[value]:
            seconds += written_s(known, source, self.mesh, self.topology)
        turned = is_made and value in self.graph.outputs
        return seconds + (turned_s(known.shape, item_bytes(known.dtype), source, target, self.mesh, self.topology) if turned else 0.0)

    def _assignment(self, chosen: Mapping[object, int]) -> Assignment:
        ops = [OpSharding(((),) * len(op.rule.sizes)) for op in self.graph.ops]
        for op in self.ops:
            ops[op.id] = OpSharding(self.ways[op.id][chosen["op", op.id]].axes)
        values = [replicated(len(value.shape)) for value in self.graph.values]
        for value, slot in enumerate(self.slot_of):
            if slot in self.places:
                values[value] = self.places[slot][chosen["slot", slot]].sharding
        return Assignment(tuple(ops), tuple(values), MODE)


def _least_peak(stored: Mapping[object, FloatArray], chosen: Mapping[object, int]) -> float:
    """The least bytes alive at the fullest op if some slots are placed as chosen."""
    total = sum(table[chosen[slot]] if slot in chosen else table.min(axis=0) for slot, table in stored.items())
    return float(np.max(total)) if stored else 0.0


def _agrees(sharding: TensorSharding, pin: PinnedDims) -> bool:
    return all(own is None or own == names for own, names in zip(pin, sharding, strict=True))
