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
from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.ir.domain import AxisCodes, axis_codes, domain
from spmdctx.ir.graph import LITERAL, Graph, Op, Value, item_bytes
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import FactorAxes
from spmdctx.ir.rule import DimFactors, FactorKind
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.collectives import LinearPrice, collective_price
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.collectives.combining import reduction_machine
from spmdctx.machine.xla.overlap import widening
from spmdctx.machine.xla.reductions import are_scattered, in_order


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
            complete &= codes.slices[rows[:, factor]] == rule.sizes[factor]
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
    """States that are found at once. Arrays are per state; `stored` is [state, result]."""

    split: IntArray
    unreduced_in: IntArray
    stored: IntArray
    unreduced_out: IntArray
    seconds: FloatArray


class _Part(NamedTuple):
    """Splits whose results are partial over the same axes: their places, and where each leaves its results. [split, result]"""

    places: IntArray
    natural: IntArray
    compute_s: FloatArray


_Scatters = list[tuple[int, AxisNames, AxisNames]]
"""The scatters of results that are partial over some axes: the code and axes to scatter over, and the axes left to reduce."""


@lru_cache(maxsize=1024)
def _extended(mesh: LogicalMesh, shape: tuple[int, ...]) -> list[list[IntArray]]:
    """Returns the sharding after the axes of a code join a dimension, minor-most, as [code, dim, number].

    It is -1 if there is no such sharding.
    """
    known, codes = domain(mesh, shape), axis_codes(mesh)
    found = []
    for added in range(len(codes)):
        after = [known.rows.copy() for _ in shape]
        for dim, rows in enumerate(after):
            rows[:, dim] = codes.joined[rows[:, dim], added]
        found.append([known.numbers(rows) for rows in after])
    return found


@lru_cache(maxsize=1024)
def _whole_words(mesh: LogicalMesh, shape: tuple[int, ...], num_bytes: int) -> BoolArray:
    """Returns whether XLA scatters into a sharding along a dimension by a reduce_scatter, as [dim, number]."""
    slices = axis_codes(mesh).slices[domain(mesh, shape).rows]
    found: BoolArray = are_scattered(-(-np.array(shape, dtype=np.int64) // slices), num_bytes).T
    return found


class _StateBuilder:
    def __init__(self, graph: Graph, op: Op, split: OpSplits, mesh: LogicalMesh, topology: Topology, use: ResultUse) -> None:
        self._is_terminal, self._later = use
        self._exposed = 1.0 - topology.compiler.reduction_overlap if use.is_terminal else 1.0
        self._reducing = reduction_machine(use.is_terminal, topology)
        self._graph, self._op, self._split, self._mesh, self._topology = graph, op, split, mesh, topology
        self._codes = axis_codes(mesh)
        self._results = [graph.values[value] for value in op.results]
        self._slices = [domain(mesh, value.shape).slices for value in self._results]
        self._bytes = [self._whole_bytes(value) for value in self._results]
        self._summed = [factor for factor, kind in enumerate(op.rule.kinds) if kind is FactorKind.REDUCTION]
        self._natural: IntArray = np.stack(split.results, axis=1) if op.results else np.zeros((len(split.rows), 0), dtype=np.int64)
        self._compute_s = self._all_compute_s()
        self._prices: dict[tuple[str, AxisNames], LinearPrice] = {}
        self._groups: list[_Group] = []
        self._sorted: list[_Group] = []

    def _whole_bytes(self, value: Value) -> int:
        """Returns the bytes of a whole result while it is partial."""
        count = item_bytes(value.dtype) * widening(self._op, value.dtype, self._is_terminal, self._topology)
        return count * math.prod(value.shape)

    def _all_compute_s(self) -> FloatArray:
        """Returns the seconds that each split computes, which depend only on the numbers of slices of the factors."""
        slices = self._codes.slices[self._split.rows]
        firsts, alike = _alike(slices)
        seconds = [sliced_time_s(self._graph, self._op, own, self._topology) for own in slices[firsts].tolist()]
        found: FloatArray = np.array(seconds)[alike]
        return found

    def add(self, hands_on: bool) -> None:
        """Adds the states of the splits whose operands are reduced."""
        rows = self._split.rows[:, self._summed]
        firsts, alike = _alike(rows)
        for number, first in enumerate(firsts):
            part = self._part(np.flatnonzero(alike == number))
            partial = tuple([name for code in rows[first].tolist() for name in self._codes.axes[code]])
            if partial:
                self._reduce(part, 0, partial, hands_on)
            else:
                self._add(part, 0, part.natural, 0, part.compute_s)
        self._sort()

    def add_unreduced(self, hands_on: bool) -> None:
        """Adds the states in which an addition takes both of its terms unreduced over axes that its split does not use."""
        taken = np.bitwise_or.reduce(self._codes.bits[self._split.rows], axis=1, initial=0)
        for bits in range(1, 1 << len(self._codes.units)):
            places = np.flatnonzero(taken & bits == 0)
            if len(places):
                self._reduce(self._part(places), bits, self._codes.names(bits), hands_on)
        self._sort()

    def _part(self, places: IntArray) -> _Part:
        return _Part(places, self._natural[places], self._compute_s[places])

    def _add(self, part: _Part, unreduced_in: int, stored: IntArray, unreduced_out: int, seconds: FloatArray) -> None:
        every = np.ones(len(part.places), dtype=np.int64)
        self._groups.append(_Group(part.places, unreduced_in * every, stored, unreduced_out * every, seconds))

    def _sort(self) -> None:
        """Sorts the states that were added by their splits; those of one split stay in the order in which they were added."""
        if self._groups:
            group = _Group(*(np.concatenate(own) for own in zip(*self._groups, strict=True)))
            order = group.split.argsort(kind="stable")
            self._sorted.append(_Group(*(own[order] for own in group)))
            self._groups = []

    def _reduce(self, part: _Part, unreduced_in: int, partial: AxisNames, hands_on: bool) -> None:
        natural, compute_s = part.natural, part.compute_s
        payloads = [whole // slices[own] for whole, slices, own in zip(self._bytes, self._slices, natural.T, strict=True)]
        reduced_s = sum(self._all_reduce_s(position, payload, partial) for position, payload in enumerate(payloads))
        self._add(part, unreduced_in, natural, 0, compute_s + self._exposed * reduced_s)
        if len(payloads) != 1 or self._op.rule.combiner != "add":
            return
        if hands_on:
            self._add(part, unreduced_in, natural, self._codes.bits_of(partial), compute_s)
        if self._later.scatters:
            self._scatter(part, unreduced_in, partial, payloads[0])

    def _scatter(self, part: _Part, unreduced_in: int, partial: AxisNames, payload: IntArray) -> None:
        """Adds the states that reduce the only result into a split of one more dimension."""
        shape = self._results[0].shape
        extended, split = _extended(self._mesh, shape), domain(self._mesh, shape).rows
        size = self._bytes[0] // max(1, math.prod(shape))
        whole_words = _whole_words(self._mesh, shape, size) if self._topology.compiler.scatters_strictly else None
        # The order of the axes in a sum of unreduced terms is up to the terms.
        order = () if unreduced_in else partial
        natural = part.natural[:, 0]
        for added, scattered, rest in self._scatters_over(partial):
            rest_s: FloatArray | float = 0.0
            if rest:
                rest_s = self._collective_s("all_reduce", payload // self._mesh.num_slices(scattered), rest)
            scatter_s = self._collective_s("reduce_scatter", payload, scattered)
            reduce_s = scatter_s if whole_words is None else self._collective_s("all_reduce", payload, scattered)
            follows = in_order(scattered, order)
            for dim, own in enumerate(extended[added]):
                stored = own[natural]
                kept = np.flatnonzero((stored >= 0) & (split[natural, dim] == 0) if rest else stored >= 0)
                own_s = scatter_s if whole_words is None else np.where(whole_words[dim][stored] & follows, scatter_s, reduce_s)
                seconds = part.compute_s + self._exposed * (own_s + rest_s)
                few = _Part(part.places[kept], part.natural[kept], part.compute_s[kept])
                self._add(few, unreduced_in, stored[kept, None], 0, seconds[kept])

    def _collective_s(self, kind: str, payload: IntArray, axes: AxisNames) -> FloatArray:
        """Returns the seconds of a collective that reduces."""
        price = self._prices.get((kind, axes))
        if price is None:
            price = self._prices[kind, axes] = collective_price(kind, axes, self._mesh, self._reducing)
        return price.fixed_s + payload * price.s_per_byte

    def _all_reduce_s(self, position: int, payload: IntArray, partial: AxisNames) -> FloatArray:
        """Returns the seconds to reduce a result in place; for an argmax XLA gathers every device's best value and its index."""
        if self._op.rule.combiner not in ("argmax", "argmin"):
            whole = np.rint(payload * self._later.size)
            return self._collective_s("all_reduce", whole, partial) * self._later.times
        dtypes = [self._graph.values[value].dtype for value in (self._op.operands[0], self._op.results[position])]
        candidates = payload // item_bytes(dtypes[1]) * self._mesh.num_slices(partial)
        price = collective_price("all_gather", partial, self._mesh, self._topology)
        first, second = (price.fixed_s + candidates * item_bytes(dtype) * price.s_per_byte for dtype in dtypes)
        return first + second

    def _scatters_over(self, partial: AxisNames) -> _Scatters:
        """Lists the codes by which a reduce_scatter can split results that are partial over some axes."""
        wanted = set(partial)
        found: _Scatters = []
        some = self._op.primitive == "dot_general"
        for added, own in enumerate(self._codes.axes):
            if own and (set(own) == wanted or (some and set(own) < wanted)):
                found.append((added, own, tuple([name for name in partial if name not in own])))
        return found

    def states(self) -> States:
        """Returns the states that were added, as arrays."""
        split, unreduced_in, stored, unreduced_out, seconds = (np.concatenate(own) for own in zip(*self._sorted, strict=True))
        wanted = tuple([own[split] for own in self._split.operands])
        left = tuple(np.ascontiguousarray(stored.T))
        return States(split, wanted, unreduced_in, left, unreduced_out, seconds, np.full(len(split), -1, dtype=np.int64))


def _alike(rows: IntArray) -> tuple[list[int], IntArray]:
    """Returns the first row of each class of equal rows, and the class of each row."""
    numbering = Numbering(np.zeros(len(rows), dtype=np.int64))
    for column in rows.T:
        numbering.refine(column)
    return numbering.classes()


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
