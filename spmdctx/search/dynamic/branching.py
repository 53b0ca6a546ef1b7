"""The cheapest choice of states that a test of the whole plan accepts, if the solver's problem only knows a part of the test.

The search tests the cheapest choice. If it fails, the choices that are left are divided by the first node that differs from it. Each
part is solved, and the cheapest of all parts is next. The result is exact if the parts are solved exactly and few enough are needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.search.problem.choices import Choices
from spmdctx.search.problem.network import Node
from spmdctx.search.problem.tables import Tables
from spmdctx.search.solver.problem.problem import Infeasible, Problem, Solution
from spmdctx.search.solver.unlimited.energy import EQUAL

T = TypeVar("T")
WORK = 2_000_000
SHORT_WORK = WORK // 4
"""Limits on the work of all parts together, as states times nodes looked at; the second is for searches for any plan."""


class Within(NamedTuple):
    """The limits of a search.

    Attributes:
        work: states times nodes of all parts together that are looked at. A search with more work finds the same solution, or a
            cheaper one.
        tolerance: the gap, relative to the cost, at which to stop.
        is_over: says that no more may be solved.
    """

    work: int = WORK
    tolerance: float = 0.0
    is_over: Callable[[], bool] = lambda: False


class Accepted(NamedTuple, Generic[T]):
    """The accepted solution, or None, and a lower bound on all solutions that would be accepted (infinite if there are none).

    If it `is_cut`, too many solutions were left: the accepted one is the cheapest of those that were seen.
    """

    found: T | None
    lower_bound: float
    is_cut: bool = False


def cheapest_accepted(
    tables: Tables,
    problem: Problem,
    first: Solution,
    solve: Callable[[Problem], Solution | Infeasible],
    accept: Callable[[Solution], T | None],
    within: Within | None = None,
) -> Accepted[T]:
    """Tries choices in the order of their cost.

    Args:
        tables: the meaning of the states.
        problem: the problem to minimise; its nodes begin with those of the tables.
        first: its solution.
        solve: solves it with some states forbidden.
        accept: turns a solution into a result, or None to reject it.
        within: the limits of the search.
    """
    work, tolerance, is_over = within or Within()
    kinds = [_kinds(node, choices) for node, choices in zip(tables.network.nodes, tables.choices, strict=True)]
    most = max(1, work // max(1, len(problem.costs) * sum(map(len, problem.costs))))
    queue: list[tuple[float, int, Solution, Problem]] = [(first.lower_bound, 0, first, problem)]
    best: T | None = None
    # A part that was given up without a proof has no solution below `left`.
    solved, cost, left = 0, float("inf"), float("inf")
    while queue and queue[0][0] < cost:
        bound, _, solution, part = heapq.heappop(queue)
        accepted = accept(solution) if solution.cost < cost else None
        if accepted is not None:
            best, cost = accepted, solution.cost
            if cost - bound <= max(tolerance, EQUAL) * abs(cost):
                break
        for own in _divided(part, kinds, solution.states):
            if solved >= most or is_over():
                # The caller may allow more work once it knows a plan.
                best, cost = _cheapest(queue, cost, accept) or (best, cost)
                if solved >= most or is_over():
                    return Accepted(best, min(bound, left, cost), is_cut=True)
            solved += 1
            found = solve(own)
            if isinstance(found, Infeasible) and not found.is_proven and is_over():
                # The work ended in the midst of this part, which is lost unless the caller allows more.
                best, cost = _cheapest(queue, cost, accept) or (best, cost)
                found = found if is_over() else solve(own)
            if isinstance(found, Solution):
                heapq.heappush(queue, (max(bound, found.lower_bound), solved, found, own))
            elif not found.is_proven:
                left = min(left, max(bound, found.lower_bound))
    return Accepted(best, min(cost, left), is_cut=best is None and left < float("inf"))


def _cheapest(
    queue: Sequence[tuple[float, int, Solution, Problem]], cost: float, accept: Callable[[Solution], T | None]
) -> tuple[T, float] | None:
    """Returns the cheapest solution below a cost that is accepted, and its cost."""
    cheaper = sorted((one for one in queue if one[2].cost < cost), key=lambda one: (one[2].cost, one[1]))
    seen = ((accept(one[2]), one[2].cost) for one in cheaper)
    return next(((found, own) for found, own in seen if found is not None), None)


def _kinds(node: Node, choices: Choices) -> IntArray | None:
    """Numbers the states of a node by the plans that they lead to; returns None if the node is no part of the plan."""
    if node.sort == "use":
        return None
    if choices.states is None:
        return choices.stored[0]
    states = choices.states
    columns = np.stack([states.split, states.unreduced_in, *choices.stored], axis=1)
    return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)


def _divided(problem: Problem, kinds: Sequence[IntArray | None], states: Sequence[int]) -> list[Problem]:
    """Returns the problem, in parts, without the choices that lead to the same plan as `states`."""
    costs, parts = list(problem.costs), []
    for node, own in enumerate(kinds):
        if own is None:
            continue
        same = own == own[states[node]]
        others = _without(costs[node], same)
        if np.isfinite(others).any():
            parts.append(replace(problem, costs=(*costs[:node], others, *costs[node + 1 :])))
        costs[node] = _without(costs[node], ~same)
    return parts


def _without(costs: FloatArray, forbidden: BoolArray) -> FloatArray:
    return np.where(forbidden, np.inf, costs)
