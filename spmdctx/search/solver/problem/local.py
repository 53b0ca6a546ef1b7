"""The improvement of a choice of states by changing one node at a time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.problem.allowance import CALL
from spmdctx.search.solver.problem.graph import CostGraph


def descend(graph: CostGraph, states: list[int]) -> float:
    """Gives each node its best state, given its neighbours, until none improves.

    Changes `states`; returns the cost less `graph.base`.
    """
    waiting = graph.nodes()
    queued = set(waiting)
    heapify(waiting)
    while waiting:
        node = heappop(waiting)
        queued.discard(node)
        total = totals(graph, node, states)
        best = int(total.argmin())
        # An improvement within rounding could go round in circles.
        if total[best] + 1e-12 * abs(total[best]) < total[states[node]]:
            states[node] = best
            for other in graph.links[node]:
                if other not in queued:
                    queued.add(other)
                    heappush(waiting, other)
    return cost(graph, states)


def totals(graph: CostGraph, node: int, states: Sequence[int]) -> FloatArray:
    """Returns the costs of a node's states beside its neighbours' present ones."""
    total, arrays = graph.costs(node), graph.pool.arrays
    graph.pool.allowance.charge(CALL)
    for other, number in graph.links[node].items():
        total = total + arrays[number][:, states[other]]
    return total


def cost(graph: CostGraph, states: list[int]) -> float:
    """Returns the cost of the nodes that are left, in their present states, less `graph.base`."""
    total = 0.0
    for node in graph.nodes():
        total += float(graph.costs(node)[states[node]])
        for other, number in graph.links[node].items():
            if node < other:
                total += float(graph.pool.arrays[number][states[node], states[other]])
    return total
