"""The choice of states that uses the least memory at its worst time, for problems in which some states exclude each other."""

from __future__ import annotations

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.limited.selection import Amounts
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.reproducible import weight
from spmdctx.search.solver.unlimited.energy import minimise
from spmdctx.search.solver.unlimited.run import SolverRun

STEPS = 40


def has_hard_tables(graph: CostGraph) -> bool:
    """Returns whether some pair of states is forbidden."""
    numbers = {number for links in graph.links for number in links.values()}
    return any(not np.isfinite(graph.pool.arrays[number]).all() for number in sorted(numbers))


def smallest(graph: CostGraph, amounts: Amounts, search: SolverRun) -> list[int] | None:
    """Returns present states with the lowest peak usage that is found; None if nothing is finite.

    Prices per row move to the rows that are used most (multiplicative weights); with one row the first step is exact.
    """
    bare = without_costs(graph)
    num_rows = len(amounts.rows.times)
    prices = np.full(num_rows, 1.0 / num_rows)
    best: list[int] | None = None
    lowest = np.inf
    for step in range(STEPS if num_rows > 1 else 1):
        found = minimise(_priced(bare, amounts, prices), search)
        if found is None or search.expired():
            break
        usage = amounts.usage(found.states)
        if usage.max() < lowest:
            best, lowest = found.states, float(usage.max())
        if usage.max() <= amounts.rows.most:
            break
        share = usage / max(float(usage.max()), 1e-300)
        prices *= weight((share - 1.0) * 8.0 / np.sqrt(step + 1.0))
        prices /= prices.sum()
    return best


def without_costs(graph: CostGraph) -> CostGraph:
    """Returns the graph with zero in place of all finite costs."""
    bare = graph.copy()
    bare.base = 0.0
    pool = graph.pool
    zeros = {number: pool.intern(np.where(np.isfinite(pool.arrays[number]), 0.0, np.inf)) for number in sorted(set(graph.unary))}
    bare.unary = [zeros[number] for number in graph.unary]
    for node in bare.nodes():
        for other, number in sorted(bare.links[node].items()):
            if node < other:
                bare.unlink(node, other)
                table = pool.arrays[number]
                if not np.isfinite(table).all():
                    bare.link(node, other, pool.intern(np.where(np.isfinite(table), 0.0, np.inf)))
    return bare


def _priced(bare: CostGraph, amounts: Amounts, prices: FloatArray) -> CostGraph:
    other = bare.copy()
    weights = amounts.rows.weights(prices)
    for node in amounts.live:
        used = amounts.of[node]
        if bare.alive[node] and used is not None:
            other.unary[node] = bare.pool.intern(bare.costs(node) + weights[node] * used)
    return other
