"""The exact change of many nodes at once: a forest in the graph, while all other nodes keep their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.limited.selection import Amounts
from spmdctx.search.solver.problem.allowance import CALL
from spmdctx.search.solver.problem.graph import CostGraph

Forest = list[tuple[int, int]]
"""Nodes, parents first, each with its parent or -1."""


def forest(graph: CostGraph, order: Iterable[int]) -> Forest:
    """Returns the nodes, in the order given, that have at most one neighbour among those taken before."""
    taken: set[int] = set()
    found: Forest = []
    for node in order:
        inside = [other for other in graph.links[node] if other in taken]
        if len(inside) <= 1:
            taken.add(node)
            found.append((node, inside[0] if inside else -1))
    return found


def tree(graph: CostGraph, seed: int, size: int) -> Forest:
    """Returns a tree of at most `size` nodes around a node, breadth first."""
    taken, left, found, waiting = {seed}, {seed}, [(seed, -1)], [seed]
    for node in waiting:
        for other in graph.links[node]:
            if other in left:
                continue
            left.add(other)
            inside = [near for near in graph.links[other] if near in taken]
            if len(inside) == 1:
                taken.add(other)
                found.append((other, node))
                waiting.append(other)
                if len(found) == size:
                    return found
    return found


def best_states(graph: CostGraph, amounts: Amounts, weights: FloatArray, nodes: Forest, states: Sequence[int]) -> dict[int, int]:
    """Returns the states of a forest's nodes that cost least with usage at `weights` per node, the others as in `states`.

    Among equal states the present one stays.
    """
    arrays, links = graph.pool.arrays, graph.links
    parents = dict(nodes)
    graph.pool.allowance.charge(2 * CALL * len(nodes))
    costs: dict[int, FloatArray] = {}
    for node, parent in nodes:
        used = amounts.of[node]
        total = graph.costs(node) if used is None or not weights[node] else graph.costs(node) + weights[node] * used
        for other, number in links[node].items():
            if other != parent and parents.get(other, -2) != node:
                total = total + arrays[number][:, states[other]]
        costs[node] = total
    for node, parent in reversed(nodes):
        if parent >= 0:
            costs[parent] = costs[parent] + (arrays[links[parent][node]] + costs[node]).min(axis=1)
    chosen: dict[int, int] = {}
    for node, parent in nodes:
        total = costs[node] if parent < 0 else costs[node] + arrays[links[parent][node]][chosen[parent]]
        best = int(total.argmin())
        now = states[node]
        chosen[node] = now if total[now] <= total[best] + 1e-12 * abs(total[best]) else best
    return chosen


def descend_forests(
    graph: CostGraph, amounts: Amounts, weights: FloatArray, states: list[int], passes: Iterable[int], random: np.random.Generator
) -> None:
    """Lowers cost and priced usage by forests that cover the graph in random orders, one for each of `passes`. Changes `states`."""
    nodes = np.array(graph.nodes())
    for _ in passes:
        for node, state in best_states(graph, amounts, weights, forest(graph, random.permutation(nodes).tolist()), states).items():
            states[node] = state
