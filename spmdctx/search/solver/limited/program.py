"""The problem as an integer program with tight edge rows, for SciPy's HiGHS.

There is a variable for each state and for each finite entry of an edge's table. The entries of a row of a table sum to the variable of
its state, so the linear relaxation is almost always integral.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack

from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.search.solver.limited.closing import fixed_usage
from spmdctx.search.solver.limited.selection import Amounts
from spmdctx.search.solver.limited.size import ROOT_WORK
from spmdctx.search.solver.problem.graph import CostGraph

NODE_LIMIT = 10_000
PRECISION = 1e-6
"""The distance from its bound at which HiGHS calls a choice optimal, in units of the scaled objective."""
SCALE = 1e4
NODE_WORK = 40_000
"""Additions that take as long as one node of the tree, for each variable."""
ROW_ROUNDS = 8
ROWS_AT_ONCE = 100
"""The number of rows that cost HiGHS less than another round does."""


class Program(NamedTuple):
    """Costs of the variables, and sparse rows that equal `sums`; `starts` is each node's first variable."""

    costs: FloatArray
    rows: Any
    sums: FloatArray
    starts: dict[int, int]
    num_states: int


def program(graph: CostGraph, most: float = np.inf) -> Program:
    """Builds the program without memory, and without the entries of tables that no choice of a cost of at most `most` can have."""
    nodes = graph.nodes()
    spare = most - graph.base - _least_sum(graph)
    starts, start = {}, 0
    for node in nodes:
        starts[node] = start
        start += graph.size(node)
    num_states, num_rows = start, len(nodes)
    costs = [graph.costs(node) for node in nodes]
    lines = [np.repeat(np.arange(len(nodes)), [graph.size(node) for node in nodes])]
    columns, values = [np.arange(num_states)], [np.ones(num_states)]
    for node in nodes:
        for other in sorted(graph.links[node]):
            if node > other:
                continue
            table = graph.table(node, other)
            lefts, rights = np.nonzero(np.isfinite(table) & (table - table.min() <= spare + 1e-9 * abs(spare)))
            entries = start + np.arange(len(lefts))
            height, width = table.shape
            lines += [num_rows + lefts, num_rows + height + rights, num_rows + np.arange(height + width)]
            columns += [entries, entries, starts[node] + np.arange(height), starts[other] + np.arange(width)]
            values += [np.ones(2 * len(lefts)), -np.ones(height + width)]
            costs.append(table[lefts, rights])
            start += len(lefts)
            num_rows += height + width
    index = (np.concatenate(lines), np.concatenate(columns))
    rows = csr_array((np.concatenate(values), index), shape=(num_rows, start))
    sums = np.zeros(num_rows)
    sums[: len(nodes)] = 1.0
    return Program(np.concatenate(costs), rows, sums, starts, num_states)


def _least_sum(graph: CostGraph) -> float:
    """Returns the sum of all least costs."""
    total = 0.0
    for node in graph.nodes():
        total += float(graph.costs(node).min())
        total += sum(float(graph.table(node, other).min()) for other in graph.links[node] if node < other)
    return total


def memory_rows(graph: CostGraph, amounts: Amounts, chosen: IntArray, starts: dict[int, int], num_variables: int) -> LinearConstraint:
    """Returns the memory constraints of some rows over the variables, as shares of the limit."""
    lines, columns, values = [], [], []
    limit, unit = amounts.rows.limit, amounts.rows.unit
    for node, start in starts.items():
        used = amounts.of[node]
        if used is None:
            continue
        for first, last, count in amounts.rows.ranges[node]:
            low, high = np.searchsorted(chosen, (first, last))
            for line in range(low, high):
                lines.append(np.full(len(used), line))
                columns.append(start + np.arange(len(used)))
                values.append(count * used)
    room = limit - fixed_usage(graph, amounts.rows)[chosen]
    index = (np.concatenate(lines), np.concatenate(columns)) if lines else (np.zeros(0, int), np.zeros(0, int))
    scaled = np.concatenate(values) if values else np.zeros(0)
    # Bytes are large. As shares of the limit the rows have HiGHS's precision.
    return LinearConstraint(csr_array((scaled / unit, index), shape=(len(chosen), num_variables)), -np.inf, room / unit)


def integer_optimum(
    graph: CostGraph, amounts: Amounts, active: list[int], most: float, seconds: float | None
) -> tuple[list[list[int]], float]:
    """Finds choices by HiGHS, and a bound.

    The last choice is the best if it is proven. The bound is infinite if no choice as cheap as `most` fits.

    Args:
        graph: The costs; every node that has a row and several states must be left.
        amounts: The usage of the graph's states.
        active: The rows to start with, if there are many; rows join as choices exceed them.
        most: A cost that some choice has, or infinite.
        seconds: HiGHS's time limit, for benchmarks; without it HiGHS's nodes are limited.
    """
    model = program(graph, most)
    scale = SCALE / max(float(np.abs(model.costs).max()), 1e-300)
    integral = np.zeros(len(model.costs))
    integral[: model.num_states] = 1
    options: dict[str, float] = {"mip_rel_gap": 0.0}
    if seconds is not None:
        options["time_limit"] = max(seconds, 0.1)
    found: list[list[int]] = []
    chosen, bound = _first_rows(len(amounts.rows.times), active), -np.inf
    for _ in range(ROW_ROUNDS):
        rows = [LinearConstraint(model.rows, model.sums, model.sums)]
        if chosen:
            rows.append(memory_rows(graph, amounts, np.array(chosen), model.starts, len(model.costs)))
        answer = _solved(graph, model.costs * scale, integral, Bounds(0, 1), rows, options)
        if answer.status == 2:
            return found, np.inf
        if answer.mip_dual_bound is not None:
            bound = max(bound, (float(answer.mip_dual_bound) - PRECISION) / scale + graph.base)
        if answer.x is None:
            break
        states = _states(graph, model, answer.x)
        found.append(states)
        fresh = _peaks(amounts.usage(states), amounts.rows.most, chosen)
        if not fresh:
            break
        chosen = sorted({*chosen, *fresh})
    return found, bound


def _first_rows(count: int, active: list[int]) -> list[int]:
    """Returns all rows, or if there are many the active ones."""
    return list(range(count)) if count <= ROWS_AT_ONCE else sorted(set(active))


def lowest_peak(graph: CostGraph, amounts: Amounts) -> list[int] | None:
    """Returns present states whose highest usage is the least possible, to HiGHS's precision; None if it finds none.

    Costs do not count.
    """
    if not graph.nodes():
        return [0] * len(graph.unary)
    model = program(graph)
    count = len(model.costs)
    memory = memory_rows(graph, amounts, np.arange(len(amounts.rows.times)), model.starts, count)
    # One more variable: the excess over the limit, as a share of the limit.
    excess = csr_array(-np.ones((len(amounts.rows.times), 1)))
    rows = [
        LinearConstraint(hstack([model.rows, csr_array((model.rows.shape[0], 1))], format="csr"), model.sums, model.sums),
        LinearConstraint(hstack([memory.A, excess], format="csr"), -np.inf, memory.ub),
    ]
    integral = np.zeros(count + 1)
    integral[: model.num_states] = 1
    bounds = Bounds(np.append(np.zeros(count), -1.0), np.append(np.ones(count), np.inf))
    answer = _solved(graph, np.append(np.zeros(count), 1.0), integral, bounds, rows, {"mip_rel_gap": 0.0})
    return None if answer.x is None else _states(graph, model, answer.x)


def _solved(
    graph: CostGraph, costs: FloatArray, integral: FloatArray, bounds: Bounds, rows: list[LinearConstraint], options: dict[str, float]
) -> Any:
    """Returns HiGHS's answer, with as many nodes as the allowance has room for."""
    allowance = graph.pool.allowance
    allowance.charge(ROOT_WORK * len(costs))
    each = NODE_WORK * len(costs)
    nodes = int(min(NODE_LIMIT, max(1.0, allowance.left / each)))
    answer = milp(costs, integrality=integral, bounds=bounds, constraints=rows, options={**options, "node_limit": nodes})
    allowance.charge(each * (getattr(answer, "mip_node_count", None) or 0))
    return answer


def _states(graph: CostGraph, model: Program, values: FloatArray) -> list[int]:
    """Returns the states that the variables choose."""
    states = [0] * len(graph.unary)
    for node, start in model.starts.items():
        states[node] = int(values[start : start + graph.size(node)].argmax())
    return states


def _peaks(usage: FloatArray, most: float, known: list[int]) -> list[int]:
    """Returns the highest row of every run of rows above the limit, without the known ones."""
    above = np.flatnonzero(usage > most)
    runs = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
    return [row for row in (int(run[usage[run].argmax()]) for run in runs if len(run)) if row not in known]
