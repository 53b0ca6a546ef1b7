"""A smaller problem that bounds the problem of a mesh with axes of equal sizes: states that differ by the names of such axes are one.

A merged state costs the least of its states, and a merged pair the least of its pairs. So no choice of the whole problem costs less
than the best of the merged one, whatever is merged. The bound is mostly tight, since equal axes mostly cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray, IntArray, WordArray
from spmdctx.ir.domain import AxisCodes, axis_codes, domain
from spmdctx.search.problem.network import Node
from spmdctx.search.problem.tables import Choices, Tables
from spmdctx.search.solver.problem.problem import Edge, Problem

_FEW_STATES = 2000
"""States up to which a problem is solved as fast as it is merged."""


def merged(tables: Tables, problem: Problem) -> Problem | None:
    """Returns the problem with merged states; None if no axes are equal, or it has few states.

    Args:
        tables: the meaning of the states.
        problem: the problem of the tables, without memory.
    """
    renamings = _renamings(axis_codes(tables.space.mesh))
    if len(renamings) == 1 or sum(map(len, problem.costs)) <= _FEW_STATES:
        return None
    known: dict[int, _Orbits] = {}
    classes = []
    for node, choices in zip(tables.network.nodes, tables.choices, strict=True):
        if id(choices) not in known:
            known[id(choices)] = _classes(tables, node, choices, renamings)
        classes.append(known[id(choices)])
    costs = tuple(_least(own, one) for own, one in zip(problem.costs, classes, strict=True))
    small: dict[tuple[int, int, int], FloatArray] = {}
    edges = []
    for left, right, table in problem.edges:
        key = (id(table), id(classes[left]), id(classes[right]))
        if key not in small:
            rows = _least(table, classes[left])
            small[key] = np.ascontiguousarray(_least(np.ascontiguousarray(rows.T), classes[right]).T)
        edges.append(Edge(left, right, small[key]))
    return Problem(costs, tuple(edges))


class _Renaming(NamedTuple):
    """Other names for equal axes: the code that takes the place of each code, and the bits that take that of each set of bits."""

    codes: IntArray
    bits: IntArray


class _Orbits(NamedTuple):
    """States sorted by class, and the start of each class among them."""

    order: IntArray
    starts: IntArray


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


def _classes(tables: Tables, node: Node, choices: Choices, renamings: Sequence[_Renaming]) -> _Orbits:
    """Finds the states of a node that some renaming makes the same."""
    keys = np.minimum.reduce([_key(tables, node, choices, renaming) for renaming in renamings])
    order = keys.argsort(kind="stable")
    return _Orbits(order, np.flatnonzero(np.diff(np.unique(keys, return_inverse=True)[1].reshape(-1)[order], prepend=-1)))


def _key(tables: Tables, node: Node, choices: Choices, renaming: _Renaming) -> WordArray:
    """Returns a number for each state after a renaming; different states hardly ever have equal ones."""
    graph, mesh, states = tables.space.graph, tables.space.mesh, choices.states
    columns: list[IntArray] = []
    if states is None or choices.split is None:
        rows = renaming.codes[domain(mesh, graph.values[node.member].shape).rows]
        columns += list(rows[choices.stored[0]].T)
        if choices.unreduced is not None:
            columns.append(renaming.bits[choices.unreduced])
    else:
        columns += list(renaming.codes[choices.split.rows][states.split].T)
        columns += [renaming.bits[states.unreduced_in], renaming.bits[states.unreduced_out], states.follows]
        for value, stored in zip(graph.ops[node.member].results, states.stored, strict=True):
            columns += list(renaming.codes[domain(mesh, graph.values[value].shape).rows][stored].T)
    key = np.zeros(len(choices.seconds), dtype=np.uint64)
    for column in columns:
        key = (key + column.astype(np.uint64) + np.uint64(2)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


def _least(array: FloatArray, classes: _Orbits) -> FloatArray:
    """Returns the least entries of each class, along the first axis."""
    least: FloatArray = np.minimum.reduceat(array[classes.order], classes.starts, axis=0)
    return least
