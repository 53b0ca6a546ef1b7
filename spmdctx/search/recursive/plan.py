"""The way of recursive_programming from request to plan: the search, the memory budget, and the suggested stage count."""

from __future__ import annotations

from dataclasses import replace

from spmdctx.cost.step import Step, bill_of
from spmdctx.errors import InfeasibleError
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.results import Shortfall
from spmdctx.search.dynamic.shortfall import place_of
from spmdctx.search.recursive.searcher import RecursiveOptions, RecursiveSearcher
from spmdctx.search.setup.request import Request, Setup

_ATTEMPTS = 6
"""Budgets that are tried before an error names the bytes of the fastest plan."""


def plan_recursive(step: Step, request: Request, topology: Topology, options: RecursiveOptions) -> tuple[Setup, Assignment]:
    """Finds the mesh, unless the user gave one, and an assignment on it.

    Args:
        step: the traced step.
        request: the user's request; more than one device.
        topology: the machine.
        options: see there.

    Returns:
        The set-up on the mesh that was found, and the assignment.

    Raises:
        StrategyError: pins that do not fit the devices.
        InfeasibleError: no plan that fits in the budget was found.
    """
    found = RecursiveSearcher(step, topology, options).plan(request)
    if isinstance(found, Shortfall):
        raise _infeasible(step, request, topology, options, found)
    return found.setup, found.assignment


def _infeasible(step: Step, request: Request, topology: Topology, options: RecursiveOptions, found: Shortfall) -> InfeasibleError:
    enough = _enough_bytes(step, request, topology, options, found)
    joined = f" Axes of the mesh were used only together: {found.joined}." if found.joined else ""
    return InfeasibleError(
        f"No plan was found that fits in memory_bytes={options.memory_bytes}: the smallest peak is {enough} bytes per device.{joined}",
        where=place_of(step, found.time),
        got=f"{found.least_bytes} bytes of values alive there, the least that this search found",
        need=f"memory_bytes >= {enough} for this search",
        fix="use more devices, a smaller batch, rematerialisation, or search_mode='dynamic_programming'",
    )


def _enough_bytes(step: Step, request: Request, topology: Topology, options: RecursiveOptions, found: Shortfall) -> int:
    """Returns a budget within which this search finds a plan.

    It tries the budgets that the search's failures name, and takes the first with a plan, else the bytes of the fastest plan.
    """
    budget = found.enough_bytes
    for _ in range(_ATTEMPTS):
        tried = RecursiveSearcher(step, topology, replace(options, memory_bytes=budget)).plan(request)
        if not isinstance(tried, Shortfall):
            return budget
        budget = max(tried.enough_bytes, budget + 1)
    fastest = RecursiveSearcher(step, topology, replace(options, memory_bytes=None)).plan(request)
    assert not isinstance(fastest, Shortfall), "only a budget can fall short"
    return bill_of(step, fastest.assignment, fastest.setup.mesh, topology).safe_bytes
