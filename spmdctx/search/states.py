"""The states of an op: every legal way to split its factors, and what becomes of its results if they are partial.

A partial result is reduced in place (all_reduce), reduced into a further split dimension (reduce_scatter), or handed on unreduced
to an addition whose other term is unreduced too, which then reduces the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.cost.collectives import collective_time_s
from spmdctx.cost.topology import Topology
from spmdctx.domains import AxisCodes, axis_codes, domain
from spmdctx.ir import LITERAL, FactorKind, Graph, Op, OpRule, item_bytes
from spmdctx.mesh import LogicalMesh
from spmdctx.search.overlap import reduction_machine, widening
from spmdctx.search.roofline import compute_time_s
from spmdctx.search.solver.problem import FloatArray, IntArray
from spmdctx.search.transfer import FactorAxes

ADDITIONS = frozenset({"add", "add_any"})


class Split(NamedTuple):
    """All splits of an op's factors: a row of codes each, and the number of each tensor's sharding in its domain."""

    rows: IntArray
    operands: tuple[IntArray, ...]
    results: tuple[IntArray, ...]


class States(NamedTuple):
    """The states of an op. Arrays are per state.

    Attributes:
        split: the place of the state's split in `Split.rows`.
        wanted: per operand, the number of the sharding it is taken in.
        unreduced_in: the axes, as bits, over which the operands are taken unreduced.
        stored: per result, the number of the sharding it is left in.
        unreduced_out: the axes over which the results are left unreduced.
        seconds: one execution: compute and reductions.
        follows: the operand that is taken as it is stored, -1 where none must be.
    """

    split: IntArray
    wanted: tuple[IntArray, ...]
    unreduced_in: IntArray
    stored: tuple[IntArray, ...]
    unreduced_out: IntArray
    seconds: FloatArray
    follows: IntArray


class Joins(NamedTuple):
    """Whether an op may take its operands unreduced, and hand its result on unreduced."""

    takes: bool
    hands_on: bool


def split_of_rule(op: Op, shapes: Sequence[tuple[int, ...]], splittable: Sequence[bool], mesh: LogicalMesh) -> Split:
    """Every legal split of an op whose operands and results have `shapes`."""
    codes, rule = axis_codes(mesh), op.rule
    rows = _legal_rows(rule, codes.rows(rule.sizes, splittable), codes)
    return _with_numbers(rule, rows, shapes, mesh)


def split_of_axes(op: Op, shapes: Sequence[tuple[int, ...]], axes: FactorAxes, mesh: LogicalMesh) -> Split:
    """The one split that the user's shard_map asks for."""
    codes = axis_codes(mesh)
    rows = np.array([[codes.code(own) for own in axes]], dtype=np.int64).reshape(1, len(axes))
    return _with_numbers(op.rule, rows, shapes, mesh)


def _with_numbers(rule: OpRule, rows: IntArray, shapes: Sequence[tuple[int, ...]], mesh: LogicalMesh) -> Split:
    codes = axis_codes(mesh)
    numbers = []
    fits = np.ones(len(rows), dtype=bool)
    for dims, shape in zip((*rule.operands, *rule.results), shapes, strict=True):
        own = domain(mesh, shape).numbers(_projected(dims, rows, codes))
        fits &= own >= 0
        numbers.append(own)
    kept = [own[fits] for own in numbers]
    return Split(rows[fits], tuple(kept[: len(rule.operands)]), tuple(kept[len(rule.operands) :]))


def _projected(dims: Sequence[tuple[int, ...]], rows: IntArray, codes: AxisCodes) -> IntArray:
    """The rows of one tensor of the op."""
    columns = np.zeros((len(rows), len(dims)), dtype=np.int64)
    for place, factors in enumerate(dims):
        for factor in factors:
            columns[:, place] = codes.joined[columns[:, place], rows[:, factor]]
    return columns


def _legal_rows(rule: OpRule, rows: IntArray, codes: AxisCodes) -> IntArray:
    """Without rows that split a minor factor of a dimension whose major factors are not completely split."""
    legal = np.ones(len(rows), dtype=bool)
    for factors in {factors for side in (rule.operands, rule.results) for dims in side for factors in dims if len(factors) > 1}:
        complete = np.ones(len(rows), dtype=bool)
        for factor in factors:
            legal &= complete | (rows[:, factor] == 0)
            complete &= codes.slices[rows[:, factor]] == rule.sizes[factor]
    return rows[legal]


def states_of(graph: Graph, op: Op, split: Split, joins: Joins, mesh: LogicalMesh, topology: Topology, is_terminal: bool = False) -> States:
    """The states of an op for its splits; `is_terminal` where its results reach no matrix product."""
    builder = _Builder(graph, op, split, mesh, topology, is_terminal)
    for place in range(len(split.rows)):
        builder.add(place, joins.hands_on)
    if joins.takes:
        builder.add_unreduced(joins.hands_on)
    return builder.states()


class _State(NamedTuple):
    split: int
    unreduced_in: int
    stored: tuple[int, ...]
    unreduced_out: int
    seconds: float


class _Builder:
    def __init__(self, graph: Graph, op: Op, split: Split, mesh: LogicalMesh, topology: Topology, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._exposed = 1.0 - topology.reduction_overlap if is_terminal else 1.0
        self._reducing = reduction_machine(is_terminal, topology)
        self._graph, self._op, self._split, self._mesh, self._topology = graph, op, split, mesh, topology
        self._codes = axis_codes(mesh)
        self._results = [domain(mesh, graph.values[value].shape) for value in op.results]
        self._summed = [factor for factor, kind in enumerate(op.rule.kinds) if kind is FactorKind.REDUCTION]
        self._natural = np.stack(split.results, axis=1).tolist() if op.results else [[] for _ in split.rows]
        self._found: list[_State] = []

    def add(self, place: int, hands_on: bool) -> None:
        """The states of one split whose operands are whole or split, but reduced."""
        row = self._split.rows[place].tolist()
        compute_s = compute_time_s(self._graph, self._op, self._codes.sharding(row), self._mesh, self._topology)
        natural = tuple(self._natural[place])
        partial = [name for factor in self._summed for name in self._codes.axes[row[factor]]]
        if not partial:
            self._found.append(_State(place, 0, natural, 0, compute_s))
            return
        self._reduce(place, 0, natural, tuple(partial), compute_s, hands_on)

    def add_unreduced(self, hands_on: bool) -> None:
        """The states in which an addition takes both of its terms unreduced over axes that it does not use."""
        for place, row in enumerate(self._split.rows.tolist()):
            used = int(np.bitwise_or.reduce(self._codes.bits[row])) if row else 0
            compute_s = compute_time_s(self._graph, self._op, self._codes.sharding(row), self._mesh, self._topology)
            for bits in range(1, 1 << len(self._codes.names(-1))):
                if bits & used == 0:
                    self._reduce(place, bits, tuple(self._natural[place]), self._codes.names(bits), compute_s, hands_on)

    def _reduce(
        self, place: int, unreduced_in: int, natural: tuple[int, ...], partial: tuple[str, ...], compute_s: float, hands_on: bool
    ) -> None:
        payloads = [self._payload(position, number) for position, number in enumerate(natural)]
        reduced_s = sum(self._all_reduce_s(position, payload, partial) for position, payload in enumerate(payloads))
        self._found.append(_State(place, unreduced_in, natural, 0, compute_s + self._exposed * reduced_s))
        if len(natural) != 1 or self._op.rule.combiner != "add":
            return
        if hands_on:
            bits = sum(1 << list(self._codes.names(-1)).index(name) for name in partial)
            self._found.append(_State(place, unreduced_in, natural, bits, compute_s))
        for stored, scattered in self._scatters(natural[0], partial):
            seconds = collective_time_s("reduce_scatter", payloads[0], scattered, self._mesh, self._reducing)
            rest = tuple(name for name in partial if name not in scattered)
            if rest:
                left = payloads[0] // self._mesh.num_slices(scattered)
                seconds += collective_time_s("all_reduce", left, rest, self._mesh, self._reducing)
            self._found.append(_State(place, unreduced_in, (stored,), 0, compute_s + self._exposed * seconds))

    def _all_reduce_s(self, position: int, payload: int, partial: tuple[str, ...]) -> float:
        """Seconds to reduce a result in place; of an argmax XLA gathers every device's best value and its index."""
        if self._op.rule.combiner not in ("argmax", "argmin"):
            return collective_time_s("all_reduce", payload, partial, self._mesh, self._reducing)
        dtypes = [self._graph.values[value].dtype for value in (self._op.operands[0], self._op.results[position])]
        candidates = payload // item_bytes(dtypes[1]) * self._mesh.num_slices(partial)
        gathered = [candidates * item_bytes(dtype) for dtype in dtypes]
        return sum(collective_time_s("all_gather", num_bytes, partial, self._mesh, self._topology) for num_bytes in gathered)

    def _scatters(self, natural: int, partial: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Shardings that a reduce_scatter can leave a result in, and the axes it scatters over."""
        known, codes = self._results[0], self._codes
        row = known.rows[natural]
        wanted = set(partial)
        some = self._op.primitive == "dot_general"
        for added, own in enumerate(codes.axes):
            if own and (set(own) == wanted or (some and set(own) < wanted)):
                for dim in range(len(row)):
                    after = row.copy()
                    after[dim] = codes.joined[row[dim], added]
                    number = int(known.numbers(after[None, :])[0])
                    if number >= 0:
                        yield number, own

    def _payload(self, position: int, number: int) -> int:
        value = self._graph.values[self._op.results[position]]
        known = self._results[position]
        count = item_bytes(value.dtype) * widening(self._op, value.dtype, self._is_terminal, self._topology)
        for size in value.shape:
            count *= size
        return count // int(known.slices[number])

    def states(self) -> States:
        """What was added, as arrays."""
        split = np.array([state.split for state in self._found], dtype=np.int64)
        stored = np.array([state.stored for state in self._found], dtype=np.int64).reshape(len(split), -1)
        return States(
            split,
            tuple(own[split] for own in self._split.operands),
            np.array([state.unreduced_in for state in self._found], dtype=np.int64),
            tuple(stored.T),
            np.array([state.unreduced_out for state in self._found], dtype=np.int64),
            np.array([state.seconds for state in self._found]),
            np.full(len(split), -1, dtype=np.int64),
        )


def following(states: States, positions: Sequence[int]) -> States:
    """Every state once for each of some operands, which it then follows."""
    if not positions:
        return states
    count, times = len(states.seconds), len(positions)
    every = np.tile(np.arange(count), times)
    wanted, stored = (tuple(own[every] for own in side) for side in (states.wanted, states.stored))
    rest = (states.split[every], wanted, states.unreduced_in[every], stored, states.unreduced_out[every], states.seconds[every])
    return States(*rest, np.repeat(np.array(positions, dtype=np.int64), count))


def shapes_of(graph: Graph, op: Op) -> list[tuple[int, ...]]:
    """The shapes of an op's operands and results; literals have none."""
    return [() if value == LITERAL else graph.values[value].shape for value in (*op.operands, *op.results)]
