"""The exact solution of very small problems with memory: all choices at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.memory import Rows

MAX_CHOICES = 200_000


class Enumerated(NamedTuple):
    """All choices of a small graph: their costs, and the usage of every row, both by the nodes' present states."""

    nodes: tuple[int, ...]
    shape: tuple[int, ...]
    costs: FloatArray
    usage: FloatArray


def enumerate_choices(graph: CostGraph, rows: Rows) -> Enumerated | None:
    """Lists all choices of states of the nodes that are left; returns None if they are too many."""
    nodes = tuple(node for node in graph.nodes() if graph.size(node) > 1)
    shape = tuple(graph.size(node) for node in nodes)
    count = math.prod(shape)
    if nodes and (count * max(len(rows.times), 8) > 8 * MAX_CHOICES or len(nodes) > 30):
        return None
    place = {node: axis for axis, node in enumerate(nodes)}

    def spread(array: FloatArray, *at: int) -> FloatArray:
        return array.reshape([array.shape[at.index(axis)] if axis in at else 1 for axis in range(len(nodes))])

    costs = np.full(shape, graph.base)
    usage = np.empty((len(rows.times), *shape))
    usage[:] = fixed_usage(graph, rows).reshape(-1, *[1] * len(nodes))
    for node in nodes:
        costs += spread(graph.costs(node), place[node])
        for other in graph.links[node]:
            if node < other:
                costs += spread(graph.table(node, other), place[node], place[other])
        used = spread(rows.usages[node][graph.origin[node]], place[node])
        for first, last, times in rows.ranges[node]:
            usage[first:last] += times * used
    return Enumerated(nodes, shape, costs.reshape(-1), usage.reshape(len(rows.times), -1))


def states_at(choices: Enumerated, index: int, num_nodes: int) -> list[int]:
    """Returns the present states of one of the choices."""
    states = [0] * num_nodes
    for node, state in zip(choices.nodes, np.unravel_index(index, choices.shape), strict=True):
        states[node] = int(state)
    return states


def fixed_usage(graph: CostGraph, rows: Rows) -> FloatArray:
    """Returns the usage of every row by the nodes that have one state."""
    usage = np.zeros(len(rows.times))
    for node, ranges in enumerate(rows.ranges):
        if ranges and graph.size(node) == 1:
            used = rows.usages[node][graph.origin[node][0]]
            for first, last, count in ranges:
                usage[first:last] += count * used
    return usage
