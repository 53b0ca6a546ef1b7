"""The removal of dominated states, and of states that fit no neighbour."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.search.solver.problem.graph import CostGraph

MAX_WORK = 20_000_000
"""The limit on the additions for comparing the rows of one table."""
MAX_PASSES = 6
WIDE = 200
"""States from which a node loses the dominated ones before messages are sent: mostly four in five, in the time of a few sweeps."""


def supported(graph: CostGraph) -> bool:
    """Removes the states of infinite cost, alone or with every state of a neighbour; returns False if a node has none left."""
    waiting = graph.nodes()
    while waiting:
        kept: dict[int, IntArray] = {}
        for node in waiting:
            fits = _fits(graph, node)
            if fits is not None:
                if not fits.any():
                    return False
                kept[node] = np.flatnonzero(fits)
        graph.restrict(kept)
        waiting = sorted({other for node in kept for other in graph.links[node]})
    return True


def _fits(graph: CostGraph, node: int) -> BoolArray | None:
    """Finds the states of a node that have a finite cost with some state of each neighbour; returns None if all have."""
    fits = graph.pool.finite(graph.unary[node])
    for number in graph.links[node].values():
        support = graph.pool.support(number)
        if support is not None:
            fits = support if fits is None else fits & support
    return None if fits is None or fits.all() else fits


def discard(graph: CostGraph, usages: Sequence[FloatArray | None] | None = None, is_over: Callable[[], bool] = lambda: False) -> int:
    """Removes dominated states, again as long as that uncovers more; returns their number.

    A state is dominated if another one costs no more whatever the neighbours do (Goldstein's criterion). With `usages` (by node and
    original state, None for nodes without) the other one must also use no more. Every state must be supported.
    Stops early, which is sound, when `is_over`.
    """
    memo: dict[tuple[object, ...], IntArray | None] = {}
    waiting, removed = graph.nodes(), 0
    for _ in range(MAX_PASSES):
        kept: dict[int, IntArray] = {}
        for node in waiting:
            if graph.size(node) > 1 and not is_over():
                used = None if usages is None else usages[node]
                usage = None if used is None else used[graph.origin[node]]
                states = _undominated(graph, node, usage, memo)
                if states is not None:
                    kept[node] = states
                    removed += graph.size(node) - len(states)
        graph.restrict(kept)
        waiting = sorted({other for node in kept for other in (node, *graph.links[node])})
        if not waiting or is_over():
            break
    return removed


def thin(graph: CostGraph) -> int:
    """Removes the dominated states of nodes that have many, like `discard` without usages; returns their number.

    States that all neighbours see alike in one way or another are compared by classes, so this takes much less time.
    """
    memo: dict[tuple[int, ...], IntArray | None] = {}
    kept: dict[int, IntArray] = {}
    for node in graph.nodes():
        if graph.size(node) >= WIDE:
            key = (graph.unary[node], *sorted(graph.links[node].values()))
            if key not in memo:
                memo[key] = _thinned(graph, key)
            states = memo[key]
            if states is not None:
                kept[node] = states
    removed = sum(graph.size(node) - len(states) for node, states in kept.items())
    graph.restrict(kept)
    return removed


def _thinned(graph: CostGraph, key: tuple[int, ...]) -> IntArray | None:
    """Returns the states of a node with these costs and tables that no other dominates; None if that takes too long, or is all."""
    pool, (unary, *numbers) = graph.pool, key
    costs = pool.arrays[unary]
    lines = [pool.lines(number) for number in numbers]
    if any(len(small) * small.size > MAX_WORK for small, _ in lines):
        return None
    worst = [(pool.worst_of_lines(number), of) for number, (_, of) in zip(numbers, lines, strict=True)]
    order = costs.argsort(kind="stable")
    # The cheapest states of each class dominate most of the others.
    cheapest = [order[np.unique(of[order], return_index=True)[1]] for small, of in lines if len(small) < len(costs)]
    first = np.unique(np.concatenate(cheapest)) if cheapest else np.zeros(0, dtype=np.int64)
    if len(first) * len(costs) > MAX_WORK:
        return None
    better = _excess(costs, worst, first, np.arange(len(costs))) <= 0
    alive = np.logical_not(np.any(better, axis=0))
    alive[first] = True
    left = np.flatnonzero(alive)
    if len(left) ** 2 <= MAX_WORK:
        better = _excess(costs, worst, left, left) <= 0
        np.fill_diagonal(better, False)
        still = _left(better)
        left = left if still is None else left[still]
    return left if len(left) < len(costs) else None


def _excess(costs: FloatArray, worst: Sequence[tuple[FloatArray, IntArray]], one: IntArray, other: IntArray) -> FloatArray:
    """Returns the most that each state of `one` can cost beyond each state of `other`, whatever the neighbours do."""
    excess: FloatArray = costs[one][:, None] - costs[other]
    for lines, of in worst:
        excess += lines.take(of[one], axis=0).take(of[other], axis=1)
    return excess


def _undominated(graph: CostGraph, node: int, usage: FloatArray | None, memo: dict[tuple[object, ...], IntArray | None]) -> IntArray | None:
    """Returns the states of a node that no other dominates; None if that is all of them, or if finding out takes too long."""
    numbers = sorted(graph.links[node].values())
    key = (graph.unary[node], *numbers, b"" if usage is None else usage.tobytes())
    if key in memo:
        return memo[key]
    pool, costs = graph.pool, graph.costs(node)
    if any(len(costs) * pool.arrays[number].size > MAX_WORK for number in numbers):
        memo[key] = None
        return None
    excess = costs[:, None] - costs
    for number in numbers:
        excess = excess + pool.worst(number)
    # A forbidden pair can make a row infinite, never minus infinite, because every state is supported.
    better = excess <= 0
    if usage is not None:
        better &= usage[:, None] <= usage
    np.fill_diagonal(better, False)
    memo[key] = _left(better)
    return memo[key]


def _left(better: BoolArray) -> IntArray | None:
    """Removes states one by one from the last, each if a state still left is at least as good; returns those left, None if all are."""
    # If two states are equally good, the later goes.
    mutual = better & better.T
    better &= ~np.tril(mutual)
    alive = np.ones(len(better), dtype=bool)
    for state in np.flatnonzero(better.any(axis=0))[::-1]:
        alive[state] = not (better[:, state] & alive).any()
    return None if alive.all() else np.flatnonzero(alive)
