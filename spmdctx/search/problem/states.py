"""The states of an op: every legal way to split its factors, and how its results are reduced if they are partial.

A partial result is reduced in place (all_reduce), reduced into a further split dimension (reduce_scatter), or handed on unreduced
to an addition whose other term is unreduced too, which then reduces the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spmdctx.cost.roofline import sliced_time_s
from spmdctx.ir.analysis.loop_sums import AT_ONCE, Later
from spmdctx.ir.analysis.numbering import Numbering
from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.ir.domain import AxisCodes, axis_codes, domain
from spmdctx.ir.graph import LITERAL, Graph, Op, Value, item_bytes
from spmdctx.ir.mesh import LogicalMesh, parts_of
from spmdctx.ir.projection import FactorAxes
from spmdctx.ir.rule import DimFactors, FactorKind
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.collectives import collective_price
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.collectives.combining import reduction_machine
from spmdctx.machine.xla.overlap import widening
from spmdctx.search.problem.reduction_prices import Scatters, extended, reductions_on, whole_words

_FEW_ROWS = 64
"""Rows up to which they are compared one by one."""


class OpSplits(NamedTuple):
    """All splits of an op's factors: a row of codes for each split, and the numbers of the tensors' shardings in their domains."""

    rows: IntArray
    operands: tuple[IntArray, ...]
    results: tuple[IntArray, ...]


class States(NamedTuple):
    """The states of an op. Arrays are per state.

    Attributes:
        split: the place of the state's split in `OpSplits.rows`.
        wanted: per operand, the number of the sharding in which the op takes it.
        unreduced_in: the axes, as bits, over which the operands are taken unreduced.
        stored: per result, the number of the sharding in which the op leaves it.
        unreduced_out: the axes, as bits, over which the results are left unreduced.
        seconds: one execution: compute and reductions.
        follows: the operand that is taken as it is stored, -1 if there is none.
    """

    split: IntArray
    wanted: tuple[IntArray, ...]
    unreduced_in: IntArray
    stored: tuple[IntArray, ...]
    unreduced_out: IntArray
    seconds: FloatArray
    follows: IntArray


class Joins(NamedTuple):
    """The permission to take operands unreduced, and to hand the result on unreduced."""

    takes: bool
    hands_on: bool


class ResultUse(NamedTuple):
    """The use of an op's results.

    Attributes:
        is_terminal: whether they reach no matrix product.
        later: how partial sums are reduced.
    """

    is_terminal: bool = False
    later: Later = AT_ONCE


def split_of_rule(op: Op, shapes: Sequence[tuple[int, ...]], splittable: Sequence[bool], mesh: LogicalMesh) -> OpSplits:
    """Lists every legal split of an op whose operands and results have `shapes`."""
    return _legal_splits(_dims_of(op), tuple(splittable), tuple(shapes), mesh)


def split_of_axes(op: Op, shapes: Sequence[tuple[int, ...]], axes: FactorAxes, mesh: LogicalMesh) -> OpSplits:
    """Returns the one split that the user's shard_map asks for."""
    codes = axis_codes(mesh)
    rows = np.array([[codes.code(own) for own in axes]], dtype=np.int64).reshape(1, len(axes))
    return _with_numbers(_dims_of(op), rows, shapes, mesh)


class _Dims(NamedTuple):
    """The part of a rule on which its splits depend; the rules of many primitives share it."""

    operands: tuple[tuple[DimFactors, ...], ...]
    results: tuple[tuple[DimFactors, ...], ...]
    sizes: tuple[int, ...]


def _dims_of(op: Op) -> _Dims:
    """Returns the dims of an op; what XLA drops of it has become a literal, which has none."""
    operands = [() if value == LITERAL else dims for value, dims in zip(op.operands, op.rule.operands, strict=True)]
    return _Dims(tuple(operands), op.rule.results, op.rule.sizes)


@lru_cache(maxsize=4096)
def _legal_splits(dims: _Dims, splittable: tuple[bool, ...], shapes: tuple[tuple[int, ...], ...], mesh: LogicalMesh) -> OpSplits:
    codes = axis_codes(mesh)
    return _with_numbers(dims, _legal_rows(dims, codes.rows(dims.sizes, splittable), codes), shapes, mesh)


def _with_numbers(rule: _Dims, rows: IntArray, shapes: Sequence[tuple[int, ...]], mesh: LogicalMesh) -> OpSplits:
    codes = axis_codes(mesh)
    numbers = []
    fits = np.ones(len(rows), dtype=bool)
    for dims, shape in zip(rule.operands + rule.results, shapes, strict=True):
        own = domain(mesh, shape).numbers(_projected(dims, rows, codes))
        fits &= own >= 0
        numbers.append(own)
    kept = [own[fits] for own in numbers]
    return OpSplits(rows[fits], tuple(kept[: len(rule.operands)]), tuple(kept[len(rule.operands) :]))


def _projected(dims: Sequence[tuple[int, ...]], rows: IntArray, codes: AxisCodes) -> IntArray:
    """Returns the rows of one tensor of the op."""
    columns = np.zeros((len(rows), len(dims)), dtype=np.int64)
    for place, factors in enumerate(dims):
        for factor in factors:
            columns[:, place] = codes.joined[columns[:, place], rows[:, factor]]
    return columns


def _legal_rows(rule: _Dims, rows: IntArray, codes: AxisCodes) -> IntArray:
    """Drops rows that split a minor factor of a dimension whose major factors are not completely split."""
    legal = np.ones(len(rows), dtype=bool)
    for factors in {factors for side in (rule.operands, rule.results) for dims in side for factors in dims if len(factors) > 1}:
        complete = np.ones(len(rows), dtype=bool)
        for factor in factors:
            legal &= complete | (rows[:, factor] == 0)
            complete &= (codes.each[:, rows[:, factor]] == rule.sizes[factor]).any(axis=0)
    return rows[legal]


def states_of(
    graph: Graph,
    op: Op,
    split: OpSplits,
    joins: Joins,
    mesh: LogicalMesh,
    topology: Topology,
    use: ResultUse | None = None,
) -> States:
    """Lists the states of an op for its splits."""
    builder = _StateBuilder(graph, op, split, mesh, topology, use or ResultUse())
    builder.add(joins.hands_on)
    if joins.takes:
        builder.add_unreduced(joins.hands_on)
    return builder.states()


class _Group(NamedTuple):
    """States that are found at once. Arrays are per state; `stored` is [state, result].

    `item` orders the states of all groups; the states of one item stay in the order of the groups.
    """

    item: IntArray
    split: IntArray
    unreduced_in: IntArray
    stored: IntArray
    unreduced_out: IntArray
    seconds: FloatArray


class _PartialSplits(NamedTuple):
    """Splits whose results are partial over some axes. Arrays are per item; `over` are the axes of each class of items.

    `is_ordered` says whether the sums are spread over the axes in their order.
    """

    item: IntArray
    split: IntArray
    unreduced_in: IntArray
    alike: IntArray
    over: list[AxisNames]
    is_ordered: bool


class _StateBuilder:
    def __init__(self, graph: Graph, op: Op, split: OpSplits, mesh: LogicalMesh, topology: Topology, use: ResultUse) -> None:
        self._is_terminal, self._later = use
        self._exposed = 1.0 - topology.compiler.reduction_overlap if use.is_terminal else 1.0
        self._reductions = reductions_on(mesh, reduction_machine(use.is_terminal, topology))
        self._graph, self._op, self._split, self._mesh, self._topology = graph, op, split, mesh, topology
        self._codes = axis_codes(mesh)
        self._results = [graph.values[value] for value in op.results]
        self._slices = [domain(mesh, value.shape).slices for value in self._results]
        self._bytes = [self._whole_bytes(value) for value in self._results]
        self._summed = [factor for factor, kind in enumerate(op.rule.kinds) if kind is FactorKind.REDUCTION]
        self._natural: IntArray = np.stack(split.results, axis=1) if op.results else np.zeros((len(split.rows), 0), dtype=np.int64)
        self._compute_s = self._all_compute_s()
        self._groups: list[_Group] = []

    def _whole_bytes(self, value: Value) -> int:
        """Returns the bytes of a whole result while it is partial."""
        count = item_bytes(value.dtype) * widening(self._op, value.dtype, self._is_terminal, self._topology)
        return count * math.prod(value.shape)

    def _all_compute_s(self) -> FloatArray:
        """Returns the seconds that each split computes, the least of those on the meshes for which this one stands."""
        found = [self._sliced_s(each[self._split.rows]) for each in self._codes.each]
        return found[0] if len(found) == 1 else np.minimum.reduce(found)

    def _sliced_s(self, slices: IntArray) -> FloatArray:
        """Returns the seconds of each split, which depend only on the numbers of slices of the factors."""
        firsts, alike = _alike(slices)
        known, seconds = _seconds_of(self._graph, self._op, self._topology), []
        for own in map(tuple, slices[firsts].tolist()):
            # Meshes of the same sizes, and those that share some, ask for the same slices.
            if own not in known:
                known[own] = sliced_time_s(self._graph, self._op, own, self._topology)
            seconds.append(known[own])
        found: FloatArray = np.array(seconds)[alike]
        return found

    def add(self, hands_on: bool) -> None:
        """Adds the states of the splits whose operands are reduced."""
        rows, every = self._split.rows[:, self._summed], np.arange(len(self._split.rows))
        if not self._summed:
            self._add(every, every, np.zeros_like(every), self._natural, 0, self._compute_s)
            return
        firsts, alike = _alike(rows)
        over = [tuple([name for code in own for name in self._codes.axes[code]]) for own in rows[firsts].tolist()]
        is_partial = np.array([bool(axes) for axes in over], dtype=bool)[alike]
        whole, partial = np.flatnonzero(~is_partial), np.flatnonzero(is_partial)
        nothing = np.zeros_like(every)
        if len(whole):
            self._add(whole, whole, nothing[whole], self._natural[whole], 0, self._compute_s[whole])
        if len(partial):
            self._reduce(_PartialSplits(partial, partial, nothing[partial], alike[partial], over, True), hands_on)

    def add_unreduced(self, hands_on: bool) -> None:
        """Adds the states in which an addition takes both of its terms unreduced over axes that its split does not use."""
        taken = np.bitwise_or.reduce(self._codes.bits[self._split.rows], axis=1, initial=0)
        subsets = np.arange(1 << len(self._codes.units))
        split, bits = np.nonzero((taken[:, None] & subsets == 0) & (subsets != 0))
        if len(split):
            # These states follow all others. The order of the axes in a sum of unreduced terms is up to the terms.
            item = len(taken) + np.arange(len(split))
            over = [self._codes.names(own) for own in subsets.tolist()]
            self._reduce(_PartialSplits(item, split, bits, bits, over, False), hands_on)

    def _add(
        self, item: IntArray, split: IntArray, unreduced_in: IntArray, stored: IntArray, unreduced_out: IntArray | int, seconds: FloatArray
    ) -> None:
        self._groups.append(_Group(item, split, unreduced_in, stored, unreduced_out + np.zeros_like(item), seconds))

    def _reduce(self, part: _PartialSplits, hands_on: bool) -> None:
        natural, compute_s = self._natural[part.split], self._compute_s[part.split]
        own = part.item, part.split, part.unreduced_in
        payloads = [whole // slices[numbers] for whole, slices, numbers in zip(self._bytes, self._slices, natural.T, strict=True)]
        reduced_s = sum(self._all_reduce_s(position, payload, part) for position, payload in enumerate(payloads))
        self._add(*own, natural, 0, compute_s + self._exposed * reduced_s)
        if len(payloads) != 1 or self._op.rule.combiner != "add":
            return
        if hands_on:
            self._add(*own, natural, np.array([self._codes.bits_of(axes) for axes in part.over])[part.alike], compute_s)
        if self._later.scatters:
            self._scatter(part, payloads[0])

    def _scatter(self, part: _PartialSplits, payload: IntArray) -> None:
        """Adds the states that reduce the only result into a split of one more dimension."""
        shape, natural = self._results[0].shape, self._natural[part.split, 0]
        some = self._op.primitive == "dot_general"
        known = Scatters(*map(np.array, zip(*[self._reductions.scatters(axes, some) for axes in part.over], strict=True)))
        longer, alike = extended(self._mesh, shape)[natural], part.alike
        fits = known.fits[alike][:, :, None] & (longer >= 0)
        fits &= ~known.is_some[alike][:, :, None] | (domain(self._mesh, shape).rows[natural] == 0)[:, None, :]
        places, added, dims = np.nonzero(fits)
        stored, payload, alike = longer[places, added, dims], payload[places], alike[places]
        rest_s = known.fixed_s[alike, added] + payload // self._codes.slices[added] * known.s_per_byte[alike, added]
        seconds = self._collective_s("reduce_scatter", payload, added)
        if self._topology.compiler.scatters_strictly:
            scatters = whole_words(self._mesh, shape, self._bytes[0] // max(1, math.prod(shape)))[:, stored, dims]
            if part.is_ordered:
                scatters = scatters & known.follows[alike, added]
            seconds = np.where(scatters, seconds, self._collective_s("all_reduce", payload, added)).min(axis=0)
        seconds = self._compute_s[part.split[places]] + self._exposed * (seconds + rest_s)
        self._add(part.item[places], part.split[places], part.unreduced_in[places], stored[:, None], 0, seconds)

    def _collective_s(self, kind: str, payload: IntArray, codes: IntArray) -> FloatArray:
        """Returns the seconds of collectives over the axes of some codes."""
        fixed_s, s_per_byte = self._reductions.lines(kind, self._codes.axes)
        seconds: FloatArray = fixed_s[codes] + payload * s_per_byte[codes]
        return seconds

    def _all_reduce_s(self, position: int, payload: IntArray, part: _PartialSplits) -> FloatArray:
        """Returns the seconds to reduce a result in place; for an argmax XLA gathers every device's best value and its index."""
        if self._op.rule.combiner not in ("argmax", "argmin"):
            fixed_s, s_per_byte = self._reductions.lines("all_reduce", part.over)
            once: FloatArray = fixed_s[part.alike] + np.rint(payload * self._later.size) * s_per_byte[part.alike]
            return once * self._later.times
        dtypes = [self._graph.values[value].dtype for value in (self._op.operands[0], self._op.results[position])]
        prices = [collective_price("all_gather", axes, self._mesh, self._topology) for axes in part.over]
        fixed_s, s_per_byte = np.array(prices).T[:, part.alike]
        meshes = parts_of(self._mesh)
        ways = np.array([min(mesh.num_slices(axes) for mesh in meshes) for axes in part.over], dtype=np.int64)[part.alike]
        candidates = payload // item_bytes(dtypes[1]) * ways
        first, second = (fixed_s + candidates * item_bytes(dtype) * s_per_byte for dtype in dtypes)
        both: FloatArray = first + second
        return both

    def states(self) -> States:
        """Returns the states that were added, as arrays, sorted by their splits."""
        found = self._groups[0]
        if len(self._groups) > 1:
            found = _Group(*(np.concatenate(own) for own in zip(*self._groups, strict=True)))
            order = found.item.argsort(kind="stable")
            found = _Group._make([own[order] for own in found])
        _, split, unreduced_in, stored, unreduced_out, seconds = found
        wanted = tuple([own[split] for own in self._split.operands])
        follows = np.full(len(split), -1, dtype=np.int64)
        return States(split, wanted, unreduced_in, tuple(np.ascontiguousarray(stored.T)), unreduced_out, seconds, follows)


def _seconds_of(graph: Graph, op: Op, topology: Topology) -> dict[tuple[int, ...], float]:
    """Returns the seconds that are known of an op by its slices, on the machine that was asked for last."""
    machine, ops = graph.facts.get(_seconds_of, (None, {}))
    if machine is not topology:
        _, ops = graph.facts[_seconds_of] = topology, dict[int, dict[tuple[int, ...], float]]()
    known: dict[tuple[int, ...], float] = ops.setdefault(op.id, {})
    return known


def _alike(rows: IntArray) -> tuple[list[int], IntArray]:
    """Returns the first row of each class of equal rows, and the class of each row."""
    if len(rows) > _FEW_ROWS:
        numbering = Numbering(np.zeros(len(rows), dtype=np.int64))
        for column in rows.T:
            numbering.refine(column)
        return numbering.classes()
    known: dict[tuple[int, ...], int] = {}
    alike = [known.setdefault(row, place) for place, row in enumerate(map(tuple, rows.tolist()))]
    return list(known.values()), np.searchsorted(list(known.values()), alike)


def following(states: States, positions: Sequence[int]) -> States:
    """Repeats every state once for each of the given operands, which it then follows."""
    if not positions:
        return states
    count, times = len(states.seconds), len(positions)
    repeated = among(states, np.tile(np.arange(count), times))
    return repeated._replace(follows=np.repeat(np.array(positions, dtype=np.int64), count))


def among(states: States, places: IntArray) -> States:
    """Returns the states at some places."""
    wanted, stored = (tuple(own[places] for own in side) for side in (states.wanted, states.stored))
    unreduced_in, unreduced_out = states.unreduced_in[places], states.unreduced_out[places]
    return States(states.split[places], wanted, unreduced_in, stored, unreduced_out, states.seconds[places], states.follows[places])


def shapes_of(graph: Graph, op: Op) -> list[tuple[int, ...]]:
    """Returns the shapes of an op's operands and results; literals have none."""
    return [() if value == LITERAL else graph.values[value].shape for value in (*op.operands, *op.results)]
