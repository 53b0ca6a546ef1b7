"""The problem of a mesh whose equal axes have lost their names: states that differ by the names of such axes are one.

A merged state costs the least of its states, and a merged pair the least of its pairs. So no choice of the whole problem costs less
than the best of the merged one, whatever is merged. The bound is mostly tight, since equal axes mostly cost the same. Then the states
that the best merged choice stands for hold a choice that costs no more than the bound.

Few pairs have to be priced: a renaming of axes that changes both states of a pair hardly changes its price. So one state of a class is
enough, beside all states of the other class, where each class has all states that other names make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

import numpy as np

from spmdctx.ir.analysis.numbering import Numbering
from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.ir.domain import AxisCodes, axis_codes, domain
from spmdctx.ir.graph import LITERAL
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.search.problem.choices import Choices, EdgeChoices
from spmdctx.search.problem.network import Carry, Load, Node
from spmdctx.search.problem.tables import Tables, without_loops
from spmdctx.search.solver.problem.problem import Edge, Problem

_FACTOR = 0x2545F4914F6CDD1D
"""An odd factor by which numbers of 64 bits are mixed."""

_FEW_STATES = 2000
"""States up to which a problem is solved as fast as it is merged."""


class Orbits(NamedTuple):
    """States of a node sorted by class, and the start of each class among them.

    `is_closed` says that each class has all states that other names of the axes make of its states.
    """

    order: IntArray
    starts: IntArray
    is_closed: bool

    def firsts(self) -> IntArray:
        """Returns one state of each class."""
        firsts: IntArray = self.order[self.starts]
        return firsts

    def members(self, number: int) -> IntArray:
        """Returns the states of a class."""
        end = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.order)
        members: IntArray = self.order[self.starts[number] : end]
        return members


class Merged:
    """The merged problem of one mesh, without memory, and the meaning of its states.

    Args:
        tables: the tables of the mesh.
        renamings: the ways to exchange equal axes; the first changes nothing.
    """

    def __init__(self, tables: Tables, renamings: Sequence[_Renaming]) -> None:
        self._tables = tables
        self._even = _EvenTables(tables, renamings)
        known: dict[tuple[object, ...], tuple[Orbits, Choices]] = {}
        found = []
        for node, choices in zip(tables.network.nodes, tables.choices, strict=True):
            shapes = _shapes(tables, node)
            key = (*shapes, *choices.layout)
            if key not in known:
                orbits = _orbits(_keys(tables.space.mesh, shapes, choices, renamings))
                known[key] = orbits, choices.among(orbits.firsts())
            found.append(known[key])
        self._orbits, self._firsts = [orbits for orbits, _ in found], [firsts for _, firsts in found]
        self._known: dict[tuple[int, int, int], FloatArray] = {}
        self._held: list[FloatArray] = []

    @cached_property
    def problem(self) -> Problem:
        """The merged problem."""
        tables, loops, edges = self._tables, list[Edge](), list[Edge]()
        for carry, load in tables.network.carries.items():
            if carry.source.node == carry.target:
                loops.append(Edge(carry.target, carry.target, tables.table(carry, load)))
            else:
                edges.append(Edge(carry.source.node, carry.target, self._table(carry, load)))
        for left, right, table in tables.coupled():
            if left == right:
                loops.append(Edge(left, right, table))
            else:
                edges.append(Edge(left, right, self._merged(table, self._orbits[left], self._orbits[right])))
        costs = without_loops(tables.costs(), loops).costs
        return Problem(tuple([_least(own, orbits) for own, orbits in zip(costs, self._orbits, strict=True)]), tuple(edges))

    def behind(self, states: Sequence[int]) -> list[IntArray]:
        """Returns for each node the states for which its merged state stands."""
        return [orbits.members(state) for orbits, state in zip(self._orbits, states, strict=True)]

    def _table(self, carry: Carry, load: Load) -> FloatArray:
        """Returns the merged table of an edge."""
        left, right = carry.source.node, carry.target
        rows, columns = self._orbits[left], self._orbits[right]
        if not (rows.is_closed and columns.is_closed):
            table = self._tables.table(carry, load)
            return self._merged(table, rows, columns)
        if len(rows.order) * len(columns.starts) <= len(rows.starts) * len(columns.order):
            return self._merged(self._even.table(carry, load, EdgeChoices(self._tables.choices[left], self._firsts[right])), rows, None)
        return self._merged(self._even.table(carry, load, EdgeChoices(self._firsts[left], self._tables.choices[right])), None, columns)

    def _merged(self, table: FloatArray, rows: Orbits | None, columns: Orbits | None) -> FloatArray:
        """Returns the least entries of a table for each class of its rows and columns; None for those that are classes already."""
        key = (id(table), id(rows), id(columns))
        found = self._known.get(key)
        if found is None:
            found = table if rows is None else _least(table, rows)
            if columns is not None:
                found = np.ascontiguousarray(_least(np.ascontiguousarray(found.T), columns).T)
            self._known[key] = found
            # If an object dies, another table may get its address.
            self._held.append(table)
        return found


class _EvenTables(Tables):
    """Tables in which a reshard costs the least of its prices under all names of equal axes."""

    def __init__(self, tables: Tables, renamings: Sequence[_Renaming]) -> None:
        vars(self).update(vars(tables))
        self._renamings = renamings
        self._edges, self._reshard_s = {}, {}

    def reshard_s(self, shape: tuple[int, ...], size: int) -> FloatArray:
        """Returns the seconds from each sharding of a shape to each, with `size` bytes per element."""
        key = (shape, size)
        known = self._reshard_s.get(key)
        if known is None:
            table, every = super().reshard_s(shape, size), domain(self.space.mesh, shape)
            orders = [every.numbers(renaming.codes[every.rows]) for renaming in self._renamings[1:]]
            known = self._reshard_s[key] = np.minimum.reduce([table, *(table.take(own, axis=0).take(own, axis=1) for own in orders)])
        return known


def merged(tables: Tables) -> Merged | None:
    """Returns the merged problem of the tables of a mesh; None if no axes are equal, or it has few states."""
    renamings = _renamings(axis_codes(tables.space.mesh))
    if len(renamings) == 1 or sum(len(choices.seconds) for choices in tables.choices) <= _FEW_STATES:
        return None
    return Merged(tables, renamings)


class _Renaming(NamedTuple):
    """Other names for equal axes: the code that takes the place of each code, and the bits that take that of each set of bits."""

    codes: IntArray
    bits: IntArray


def _renamings(codes: AxisCodes) -> list[_Renaming]:
    """Lists the ways to exchange axes of equal sizes; the first changes nothing."""
    names = [own[0] for own in codes.units]
    sizes = codes.mesh.sizes
    found = []
    for others in permutations(names):
        if any(sizes[name] != sizes[other] for name, other in zip(names, others, strict=True)):
            continue
        to = dict(zip(names, others, strict=True))
        after = np.array([codes.of[tuple([to[name] for name in own])] for own in codes.axes], dtype=np.int64)
        every = [sum(int(codes.bits[codes.of[to[name],]]) for name in codes.names(bits)) for bits in range(1 << len(names))]
        found.append(_Renaming(after, np.array(every, dtype=np.int64)))
    return found


def resembling(tables: Tables, other: Tables) -> list[IntArray]:
    """Finds the states that do the same on two meshes of as many axes, which correspond in the order of their sizes.

    Returns for each node, for each of its states in `tables`, the state in `other`, -1 for none.
    """
    renaming = _renaming_to(axis_codes(tables.space.mesh), axis_codes(other.space.mesh))
    same = _Renaming(np.arange(len(renaming.codes)), np.arange(len(renaming.bits)))
    known: dict[tuple[object, ...], IntArray] = {}
    found = []
    for node, own, others in zip(tables.network.nodes, tables.choices, other.choices, strict=True):
        shapes = _shapes(tables, node)
        key = (*shapes, own.layout, others.layout)
        if key not in known:
            marks = _marks(other.space.mesh, shapes, others, same)
            wanted = _marks(tables.space.mesh, shapes, own, renaming)
            order = marks.argsort(kind="stable")
            at = order[np.minimum(np.searchsorted(marks, wanted, sorter=order), len(order) - 1)]
            known[key] = np.where(marks[at] == wanted, at, -1)
        found.append(known[key])
    return found


class Precedents:
    """Plans of programs that are nearly alike, by mesh: searches of others begin with the same states for the nodes that are like theirs.

    Nodes are alike if their ops or values, their weights and their numbers among such nodes are. Meshes on which a program had no plan
    within memory are kept, too.
    """

    def __init__(self) -> None:
        self._known: dict[LogicalMesh, tuple[list[dict[object, int]], float]] = {}
        self._short: dict[LogicalMesh, tuple[int, int]] = {}

    def keep(self, tables: Tables, choices: Iterable[Sequence[int]], gap: float) -> None:
        """Keeps the choices of states of which a plan within memory is made.

        `gap` is the share by which it costs more than the least without memory; 0 if that is not known.
        """
        kinds, marks = _kinds_of(tables), _marks_of(tables)
        known = [{key: int(own[state]) for key, own, state in zip(kinds, marks, states, strict=True)} for states in choices]
        self._known[tables.space.mesh] = known, gap

    def starts(self, tables: Tables, problem: Problem) -> tuple[tuple[tuple[int, ...], ...], float]:
        """Returns choices of states from which a search may start, and the gap of the plan that they are of."""
        if tables.space.mesh not in self._known:
            return (), 0.0
        choices, gap = self._known[tables.space.mesh]
        kinds, marks = _kinds_of(tables), _marks_of(tables)
        states = [[_place(own, known.get(key)) for key, own in zip(kinds, marks, strict=True)] for known in choices]
        return tuple([tuple(_filled_in(problem, own)) for own in states]), gap

    def keep_short(self, tables: Tables, memory_bytes: int) -> None:
        """Keeps that no plan of a program was found on its mesh within so many bytes."""
        self._short[tables.space.mesh] = len(tables.space.graph.ops), memory_bytes

    def is_short(self, tables: Tables, memory_bytes: int) -> bool:
        """Returns whether no plan of a program that is not larger was found on the mesh within as many bytes."""
        num_ops, most_bytes = self._short.get(tables.space.mesh, (0, -1))
        return len(tables.space.graph.ops) >= num_ops and memory_bytes <= most_bytes


def _place(marks: IntArray, mark: int | None) -> int:
    """Returns the first state that has a mark, or -1."""
    places = np.flatnonzero(marks == mark) if mark is not None else np.zeros(0, dtype=np.int64)
    return int(places[0]) if len(places) else -1


def _kinds_of(tables: Tables) -> list[object]:
    """Returns for each node what it has in common with one of another program."""
    graph, counts, found = tables.space.graph, Counter[object](), list[object]()
    for node in tables.network.nodes:
        values = (node.member,) if node.sort != "op" else (*graph.ops[node.member].operands, *graph.ops[node.member].results)
        types = tuple([(graph.values[value].shape, graph.values[value].dtype) for value in values if value != LITERAL])
        name = graph.ops[node.member].primitive if node.sort == "op" else node.sort
        kind = (name, types, node.weight, node.joins, node.terminal, node.later)
        found.append((kind, counts[kind]))
        counts[kind] += 1
    return found


def _marks_of(tables: Tables) -> list[IntArray]:
    """Returns the numbers of the states of each node, which mean the same for other programs on the mesh."""
    mesh, known, found = tables.space.mesh, dict[tuple[object, ...], IntArray](), list[IntArray]()
    same = _renaming_to(axis_codes(mesh), axis_codes(mesh))
    for node, choices in zip(tables.network.nodes, tables.choices, strict=True):
        shapes = _shapes(tables, node)
        key = (*shapes, choices.layout)
        if key not in known:
            known[key] = _marks(mesh, shapes, choices, same)
        found.append(known[key])
    return found


def _filled_in(problem: Problem, states: list[int]) -> list[int]:
    """Gives nodes without a state (-1) the one that costs least beside the states of their neighbours, twice."""
    missing = {node for node, state in enumerate(states) if state < 0}
    beside: dict[int, list[tuple[int, FloatArray]]] = {node: [] for node in missing}
    for left, right, table in problem.edges:
        if left in missing:
            beside[left].append((right, table.T))
        if right in missing:
            beside[right].append((left, table))
    for node in (*missing, *missing):
        rows = [table[states[other]] for other, table in beside[node] if states[other] >= 0]
        states[node] = int(np.sum([problem.costs[node], *rows], axis=0).argmin())
    return states


def _renaming_to(codes: AxisCodes, others: AxisCodes) -> _Renaming:
    """Returns the codes and bits on another mesh, whose axes correspond in the order of their sizes."""
    first, second = (sorted(own.mesh.names, key=own.mesh.sizes.__getitem__) for own in (codes, others))
    to = dict(zip(first, second, strict=True))
    after = np.array([others.of[tuple([to[name] for name in own])] for own in codes.axes], dtype=np.int64)
    bits = [others.bits_of([to[name] for name in codes.names(own)]) for own in range(1 << len(codes.units))]
    return _Renaming(after, np.array(bits, dtype=np.int64))


def _marks(mesh: LogicalMesh, shapes: Sequence[tuple[int, ...]], choices: Choices, renaming: _Renaming) -> IntArray:
    """Returns a number for each state of a node, after a renaming; different states have hardly ever the same."""
    columns = [row for shape, own in zip(shapes, choices.stored, strict=True) for row in renaming.codes[domain(mesh, shape).rows[own]].T]
    states, split = choices.states, choices.split
    if states is not None and split is not None:
        columns += [*renaming.codes[split.rows[states.split]].T, states.follows + 1]
        columns += [renaming.bits[own] for own in (states.unreduced_in, states.unreduced_out)]
    elif choices.unreduced is not None:
        columns.append(renaming.bits[choices.unreduced])
    marks = np.zeros(len(choices.seconds), dtype=np.int64)
    for own in columns:
        marks = marks * _FACTOR + own
    return marks


def _shapes(tables: Tables, node: Node) -> list[tuple[int, ...]]:
    """Returns the shapes of the values that a node stores."""
    graph = tables.space.graph
    return [graph.values[value].shape for value in (graph.ops[node.member].results if node.sort == "op" else (node.member,))]


def _keys(mesh: LogicalMesh, shapes: Sequence[tuple[int, ...]], choices: Choices, renamings: Sequence[_Renaming]) -> IntArray:
    """Numbers the states of a node after each renaming. [renaming, state]"""
    states, split = choices.states, choices.split
    columns = []
    for shape, stored in zip(shapes, choices.stored, strict=True):
        known = domain(mesh, shape)
        columns.append([known.numbers(renaming.codes[known.rows])[stored] for renaming in renamings])
    if states is not None and split is not None:
        rows = _numbers([[renaming.codes[own] for renaming in renamings] for own in split.rows.T], len(split.rows), len(renamings))
        columns.append(list(rows[:, states.split]))
        columns += [[renaming.bits[own] for renaming in renamings] for own in (states.unreduced_in, states.unreduced_out)]
        columns.append([states.follows + 1] * len(renamings))
    elif choices.unreduced is not None:
        columns.append([renaming.bits[choices.unreduced] for renaming in renamings])
    return _numbers(columns, len(choices.seconds), len(renamings))


def _numbers(columns: Sequence[Sequence[IntArray]], count: int, times: int) -> IntArray:
    """Numbers things after each renaming; equal things have equal numbers. [renaming, thing]"""
    numbering = Numbering(np.zeros(times * count, dtype=np.int64))
    for own in columns:
        numbering.refine(np.concatenate(own))
    return numbering.numbers.reshape(times, count)


def _orbits(keys: IntArray) -> Orbits:
    """Finds the states that some renaming makes the same, from their numbers after each renaming."""
    least = keys.min(axis=0)
    order = least.argsort(kind="stable")
    starts = np.flatnonzero(np.diff(least[order], prepend=-1))
    sizes = 1 + np.count_nonzero(np.diff(np.sort(keys[:, order[starts]], axis=0), axis=0), axis=0)
    return Orbits(order, starts, int(sizes.sum()) == len(np.unique(keys[0])))


def _least(array: FloatArray, classes: Orbits) -> FloatArray:
    """Returns the least entries of each class, along the first axis."""
    least: FloatArray = np.minimum.reduceat(array[classes.order], classes.starts, axis=0)
    return least
