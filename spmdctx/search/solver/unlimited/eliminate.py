"""Exact elimination: nodes are minimised out one by one, in the order that keeps the tables small."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from math import prod
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.problem.allowance import CALL
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.join import least
from spmdctx.search.solver.problem.pool import Pool

Memo = dict[tuple[object, ...], tuple[int, float]]
Factors = dict[tuple[int, ...], int]


class Order(NamedTuple):
    """Nodes in the order of elimination, entries of the largest table, and additions in all."""

    nodes: tuple[int, ...]
    largest: int
    work: int


def order(graph: CostGraph, max_table: int, max_work: int, sizes: Mapping[int, int] | None = None) -> Order | None:
    """Returns the greedy order by the smallest table; None as soon as a table or the work would exceed its limit.

    `sizes` are numbers of states per node that replace those of the graph.
    """
    sizes = sizes or {node: graph.size(node) for node in graph.nodes()}
    # Nodes of one state connect no others.
    near = {node: {other for other in graph.links[node] if sizes[other] > 1} if size > 1 else set() for node, size in sizes.items()}
    weights = {node: _product(sizes, near[node]) for node in sizes}
    queue = [(weight, node) for node, weight in weights.items()]
    heapify(queue)
    nodes, largest, work = [], 1, 0
    while queue:
        weight, node = heappop(queue)
        if weights.get(node) != weight:
            continue
        largest, work = max(largest, weight), work + weight * sizes[node]
        if largest > max_table or work > max_work:
            return None
        nodes.append(node)
        del weights[node]
        neighbours = near.pop(node)
        for other in neighbours:
            around = near[other]
            around |= neighbours
            around -= {node, other}
        for other in neighbours:
            changed = _product(sizes, near[other])
            if changed != weights[other]:
                weights[other] = changed
                heappush(queue, (changed, other))
    return Order(tuple(nodes), largest, work)


def _product(sizes: Mapping[int, int], nodes: set[int]) -> int:
    product = 1
    for node in nodes:
        product *= sizes[node]
    return product


class Elimination(NamedTuple):
    """The result of an elimination: the tables in which each node was minimised out, in their order, and the least cost.

    The cost is without `graph.base`.
    """

    steps: tuple[tuple[int, Factors], ...]
    cost: float


def eliminate(graph: CostGraph, nodes: tuple[int, ...], memo: Memo, expired: Callable[[], bool]) -> tuple[list[int], float] | None:
    """Returns the best states of the nodes that are left, and their cost without `graph.base`; None if the time is over.

    Args:
        graph: The costs; left as they are.
        nodes: All nodes that are left, in the order of elimination.
        memo: Tables found before, for this graph's pool.
        expired: Asked before each table.
    """
    found = elimination(graph, nodes, memo, expired)
    if found is None:
        return None
    states = [0] * len(graph.unary)
    for node, around in reversed(found.steps):
        states[node] = _state(node, around, graph.pool, states)
    return states, found.cost


def elimination(graph: CostGraph, nodes: tuple[int, ...], memo: Memo, expired: Callable[[], bool]) -> Elimination | None:
    """Eliminates the same nodes; returns all tables on the way, and no states."""
    factors: list[Factors] = [{} for _ in graph.unary]
    pool = graph.pool
    for node in nodes:
        factors[node][node,] = graph.unary[node]
        for other, number in graph.links[node].items():
            if node < other:
                factors[node][node, other] = factors[other][node, other] = number
    steps, cost = [], 0.0
    for node in nodes:
        if expired():
            return None
        near, number, lowest = _minimised(node, factors, pool, memo)
        cost += lowest
        steps.append((node, factors[node]))
        for scope in factors[node]:
            for other in scope:
                if other != node:
                    del factors[other][scope]
        if not near:
            cost += float(pool.arrays[number].item())
            continue
        present = factors[near[0]].get(near)
        if present is not None:
            number = pool.total(present, number)
        for other in near:
            factors[other][near] = number
    return Elimination(tuple(steps), cost)


def _minimised(node: int, factors: list[Factors], pool: Pool, memo: Memo) -> tuple[tuple[int, ...], int, float]:
    """Returns the neighbours of a node, the number of the table over them after it is minimised out, and a constant to add."""
    around = factors[node]
    near = tuple(sorted({other for scope in around for other in scope if other != node}))
    place = {other: position for position, other in enumerate(near)}
    place[node] = -1
    terms = sorted((tuple(place[other] for other in scope), number) for scope, number in around.items())
    key = tuple(terms)
    result = memo.get(key)
    if result is None:
        operands = []
        for places, operand in terms:
            array, at = pool.arrays[operand], places.index(-1)
            if at:
                array = array.transpose(at, *(axis for axis in range(array.ndim) if axis != at))
                places = (-1, *(other for other in places if other >= 0))
            operands.append((places, array))
        pool.allowance.charge(2 * CALL + _additions(operands))
        result = memo[key] = pool.lowered(least(operands, len(near)))
    return near, *result


def _additions(operands: list[tuple[tuple[int, ...], FloatArray]]) -> int:
    """Returns the entries of the sum of all operands."""
    sizes = {place: size for places, array in operands for place, size in zip(places, array.shape, strict=True)}
    return prod(sizes.values())


def _state(node: int, around: Factors, pool: Pool, states: list[int]) -> int:
    """Returns the best state of a node, given its neighbours' states."""
    total: FloatArray = np.zeros(1)
    for scope, number in around.items():
        total = total + pool.arrays[number][tuple(slice(None) if other == node else states[other] for other in scope)]
    return int(total.argmin())
