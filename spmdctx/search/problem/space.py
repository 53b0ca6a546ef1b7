"""The planning problem as propagation prices it: slots of tied values, interned shardings, and memoised prices of ops.

A slot is a class of values that must share one sharding. The price of an op, given the shardings of its slots, is

    compute (roofline) + sum of reshards of its operands + reduction of its partial results + reshard of its results

in predicted seconds, minimised over the op's candidates.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spmdctx.cost.roofline import compute_time_s, passing_values, written_s
from spmdctx.ir.analysis.incidence import Incidences, ends, incidences
from spmdctx.ir.analysis.numbering import numbered_rows
from spmdctx.ir.analysis.repeats import made_repeats, read_repeats
from spmdctx.ir.graph import LITERAL, Graph, Op, Work, item_bytes
from spmdctx.ir.mesh import LogicalMesh, local_shape, replicated
from spmdctx.ir.primitives import MATRIX_PRODUCTS, OUTSIDE, Boundary
from spmdctx.ir.projection import FactorAxes, legal, merge, partial_axes, project
from spmdctx.ir.rule import OpRule
from spmdctx.ir.sharding import AxisNames, OpSharding, TensorSharding
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.reshard import reshard_time_s
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.collectives.turning import turned_s
from spmdctx.machine.xla.reductions import reduction_plan, scattered_by
from spmdctx.search.setup.limits import AlgoLimits

NO_SLOT = -1


class OpChoice(NamedTuple):
    """The cheapest way to do one op: axes per factor (also as a sharding) and seconds per execution."""

    axes: FactorAxes
    time_s: float
    sharding: OpSharding


class OpKind(NamedTuple):
    """The common properties of the ops of one kind: everything that prices depend on, except the shardings of the slots.

    `rule` is the id of the rule object. `tensors` are the shapes and types of operands and results, None for literals. `free` says for
    each of them whether it comes from literals; it is empty if none does. `flops`, `fused` and `work` are the ops' own. `passing` says
    which of its values are only computed on the way, `returned` which results the step returns, where that matters.
    """

    rule: int
    primitive: str
    tensors: tuple[tuple[tuple[int, ...], str] | None, ...]
    free: tuple[bool, ...]
    flops: int = 0
    fused: int = 0
    work: Work | None = None
    passing: tuple[bool, ...] = ()
    returned: tuple[bool, ...] = ()


class Space:
    """A graph on a mesh. Shardings and kinds of ops are numbered, so that memo keys are tuples of small integers.

    A state is a list with the number of each slot's sharding. `NO_SLOT`, its last place, stands for literals.
    """

    def __init__(
        self, graph: Graph, mesh: LogicalMesh, topology: Topology, from_literals: frozenset[int], limits: AlgoLimits | None = None
    ) -> None:
        self.graph, self.mesh, self.topology = graph, mesh, topology
        self.limits = limits if limits is not None and limits.restricts else None
        self.shardings: list[TensorSharding] = []
        self._numbers: dict[TensorSharding, int] = {}
        self._splittable: dict[int, tuple[bool, ...]] = {}
        self._choices: dict[tuple[int, ...], OpChoice] = {}
        self.slot_of = _union(len(graph.values), graph.ties)
        self.free_slots = frozenset(self.slot_of[value] for value in from_literals)
        slot = [*self.slot_of, NO_SLOT].__getitem__
        self.op_slots = [tuple(map(slot, op[2] + op[3])) for op in graph.ops]
        self.kinds: list[OpKind] = []
        self.passing = passing_values(self.graph)
        self._returned = frozenset(graph.outputs) - {LITERAL} if topology.compiler.turns_gathers else frozenset[int]()
        self.kind_of = self._number_kinds()
        self.shapes = [value.shape for value in graph.values]
        self.whole = self._whole()

    def on(self, mesh: LogicalMesh) -> Space:
        """Returns the space of the same graph on another mesh."""
        other = copy(self)
        other.mesh, other.shardings, other._numbers, other._choices = mesh, [], {}, {}
        other.whole = other._whole()
        return other

    def _whole(self) -> list[int]:
        ranks = [len(shape) for shape in self.shapes]
        numbers = {rank: self.number(replicated(rank)) for rank in dict.fromkeys(ranks)}
        return [*map(numbers.__getitem__, ranks), NO_SLOT]

    def number(self, sharding: TensorSharding) -> int:
        """Returns the number of a sharding; equal shardings have equal numbers."""
        known = self._numbers.get(sharding)
        if known is None:
            known = self._numbers[sharding] = len(self.shardings)
            self.shardings.append(sharding)
        return known

    def splittable(self, rule: OpRule) -> tuple[bool, ...]:
        """Returns `rule.splittable`, computed once per rule object."""
        known = self._splittable.get(id(rule))
        if known is None:
            known = self._splittable[id(rule)] = rule.splittable
        return known

    @cached_property
    def neighbours(self) -> list[list[int]]:
        """The ops that read or make the values of each slot."""
        neighbours: list[list[int]] = [[] for _ in self.graph.values]
        for index, slots in enumerate(self.op_slots):
            for slot in set(slots):
                if slot != NO_SLOT:
                    neighbours[slot].append(index)
        return neighbours

    @cached_property
    def incidences(self) -> Incidences:
        """The operands and results that are not free to place."""
        return incidences(self.graph, self.slot_of, self.free_slots)

    def _number_kinds(self) -> list[int]:
        """Numbers the kinds of ops, and returns the number of each op's kind."""
        graph, every = self.graph, ends(self.graph)
        # For each operand and result: does it pass, is it from literals, and is it returned? Literals do nothing of that.
        flags = np.zeros(len(graph.values) + 1, dtype=np.uint8)
        flags[:-1] = np.frombuffer(self.passing, dtype=np.uint8)
        flags |= 2 * np.isin(np.array([*self.slot_of, NO_SLOT], dtype=np.int64), list(self.free_slots)).astype(np.uint8)
        flags[list(self._returned)] |= 4
        alike = numbered_rows(np.array(graph.kinds, dtype=np.int64), every.ops, flags[every.values])
        firsts = np.unique(alike, return_index=True)[1].tolist()
        numbers: dict[OpKind, int] = {}
        known = np.array([numbers.setdefault(self._kind(graph.ops[first]), len(numbers)) for first in firsts], dtype=np.int64)
        self.kinds = list(numbers)
        kinds: list[int] = known[alike].tolist()
        return kinds

    def _kind(self, op: Op) -> OpKind:
        slots = self.op_slots[op.id]
        free = () if self.free_slots.isdisjoint(slots) else tuple([slot in self.free_slots for slot in slots])
        every = [None if value == LITERAL else self.graph.values[value] for value in (*op.operands, *op.results)]
        tensors = tuple([value and (value.shape, value.dtype) for value in every])
        passing = tuple([bool(self.passing[value]) for value in (*op.operands, *op.results) if value != LITERAL])
        returned = tuple([value in self._returned for value in op.results])
        return OpKind(id(op.rule), op.primitive, tensors, free, op.flops, op.fused, op.work, passing, returned)

    def key(self, index: int, state: list[int]) -> tuple[int, ...]:
        """Returns the key of an op's price: the number of its kind, then those of its slots' shardings."""
        return (self.kind_of[index], *map(state.__getitem__, self.op_slots[index]))

    def choose(self, index: int, state: list[int]) -> OpChoice:
        """Returns the cheapest candidate of an op in a state."""
        key = self.key(index, state)
        known = self._choices.get(key)
        if known is None:
            shardings = [self.shardings[number] if number != NO_SLOT else () for number in key[1:]]
            known = self._choices[key] = self._cheapest(self.graph.ops[index], shardings, self.kinds[key[0]].free)
        return known

    def _cheapest(self, op: Op, shardings: list[TensorSharding], free: tuple[bool, ...]) -> OpChoice:
        best: OpChoice | None = None
        ways = candidates(op, shardings, self.splittable(op.rule), self.mesh)
        if self.limits:
            ways = [axes for axes in ways if self.limits.allows(op, axes, self.mesh, shardings)] or [((),) * len(op.rule.sizes)]
        for axes in ways:
            time_s = self._price(op, axes, shardings, free)
            if best is None or time_s < best.time_s * (1 - 1e-9):
                best = OpChoice(axes, time_s, OpSharding(axes))
        assert best is not None
        return best

    def _price(self, op: Op, axes: FactorAxes, shardings: list[TensorSharding], free: tuple[bool, ...]) -> float:
        rule = op.rule
        time_s = compute_time_s(self.graph, op, axes, self.mesh, self.topology)
        for position, (value, dims) in enumerate(zip(op.operands, rule.operands, strict=True)):
            if value != LITERAL and not (free and free[position]):
                time_s += (
                    self.reshard_s(value, shardings[position], project(dims, axes)) * read_repeats(self.graph, op) / max(1, op.repeats)
                )
        partial = partial_axes(rule, axes)
        for position, (value, dims) in enumerate(zip(op.results, rule.results, strict=True), len(op.operands)):
            natural = project(dims, axes)
            if partial:
                time_s += self._reduction_time_s(op, value, natural, shardings[position], partial)
            else:
                time_s += self._made_s(value, natural, shardings[position]) * made_repeats(self.graph, op) / max(1, op.repeats)
        return time_s

    def reshard_s(self, value: int, source: TensorSharding, target: TensorSharding) -> float:
        """Returns the seconds that resharding a value takes."""
        if source == target:
            return 0.0
        size = item_bytes(self.graph.values[value].dtype)
        seconds = reshard_time_s(self.shapes[value], size, source, target, self.mesh, self.topology)
        return seconds + written_s(self.graph.values[value], source, self.mesh, self.topology) if self.passing[value] else seconds

    def _reduction_time_s(self, op: Op, value: int, natural: TensorSharding, stored: TensorSharding, partial: AxisNames) -> float:
        """Returns the seconds that turning an unreduced result into its stored sharding takes."""
        plan = reduction_plan(op, natural, stored, partial)
        payload = self._local_bytes(value, natural)
        time_s = 0.0
        if plan.scattered:
            size = item_bytes(self.graph.values[value].dtype)
            kind = scattered_by(self.shapes[value], size, partial, natural, plan.after, self.mesh, self.topology)
            time_s += collective_time_s(kind, payload, plan.scattered, self.mesh, self.topology)
            payload //= self.mesh.num_slices(plan.scattered)
        if plan.reduced:
            time_s += collective_time_s("all_reduce", payload, plan.reduced, self.mesh, self.topology)
        return time_s + self._made_s(value, plan.after, stored)

    def _made_s(self, value: int, source: TensorSharding, stored: TensorSharding) -> float:
        """Returns the seconds in which a result gets where it is stored."""
        seconds = self.reshard_s(value, source, stored)
        if value in self._returned:
            size = item_bytes(self.graph.values[value].dtype)
            seconds += turned_s(self.shapes[value], size, source, stored, self.mesh, self.topology)
        return seconds

    def _local_bytes(self, value: int, sharding: TensorSharding) -> int:
        return self.local_elements(value, sharding) * item_bytes(self.graph.values[value].dtype)

    def local_elements(self, value: int, sharding: TensorSharding) -> int:
        """Returns the number of elements of one device's block."""
        count = 1
        for size in local_shape(self.shapes[value], sharding, self.mesh):
            count *= size
        return count


def candidates(op: Op, shardings: list[TensorSharding], splittable: tuple[bool, ...], mesh: LogicalMesh) -> list[FactorAxes]:
    """Lists the ways to split an op that the shardings of its tensors suggest, each tensor in the lead once.

    If some of them take all operands as they are stored (or slices of them), only those are returned. Else a matrix product is split
    as far as possible, because computing it more than once per device is a bad way to save a collective. For any other op, candidates
    that leave out one axis follow, and last the one that keeps everything whole. The boundary of a loop follows the tensor inside the
    loop, so that a reshard happens once, outside.
    """
    rule = op.rule
    if op.primitive in OUTSIDE:
        inside = (rule.operands[0], shardings[0]) if op.boundary is Boundary.EXIT else (rule.results[0], shardings[-1])
        return [merge(rule, [inside], splittable, mesh)]
    tensors = [(dims, sharding) for dims, sharding in zip((*rule.operands, *rule.results), shardings, strict=True) if sharding]
    found: dict[FactorAxes, None] = {}
    split = [pair for pair in tensors if any(pair[1])]
    for leader in split:
        found[merge(rule, [leader, *(pair for pair in split if pair is not leader)], splittable, mesh)] = None
    operands = [pair for pair in zip(rule.operands, shardings, strict=False) if any(pair[1])]
    smooth = [axes for axes in found if all(_extends(project(dims, axes), sharding) for dims, sharding in operands)]
    if smooth:
        return smooth
    if found and op.primitive in MATRIX_PRODUCTS:
        most = max(mesh.num_slices(name for own in axes for name in own) for axes in found)
        return [axes for axes in found if mesh.num_slices(name for own in axes for name in own) == most]
    for axes in list(found):
        for name in {name: None for own in axes for name in own}:
            dropped = tuple(own[: own.index(name)] if name in own else own for own in axes)
            found[legal(rule, dropped, mesh)] = None
    found[((),) * len(rule.sizes)] = None
    return list(found)


def _extends(wanted: TensorSharding, stored: TensorSharding) -> bool:
    return all(new[: len(own)] == own for new, own in zip(wanted, stored, strict=True))


def _union(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Returns for each element the representative (smallest member) of its class."""
    parent = list(range(count))

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for left, right in pairs:
        a, b = find(left), find(right)
        if a != b:
            parent[max(a, b)] = min(a, b)
    return [find(item) for item in range(count)]
