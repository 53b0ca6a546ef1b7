"""The budget that an error names works, and none below it is found to."""

import re

import pytest

from spmdctx.search import shortfall
from spmdctx.search.dynamic import DynamicOptions, Shortfall, plan_dynamic
from spmdctx.search.exhaustive import Conditions, exhaustive
from spmdctx.search.modes import Request
from spmdctx.search.price import price
from spmdctx.search.step import Step
from tests.search.random_graphs import fused, random_machine, random_mesh, random_step


def _problem(seed):
    """A small step, a request on one mesh, and a machine."""
    made, mesh = random_step(seed, 4), random_mesh(seed)
    made = fused(made) if seed % 2 else made
    request = Request("auto_parallel", mesh.num_devices, mesh, None, (), frozenset(), (), (), frozenset())
    return made, Step(made.graph, made.scopes, made.loose, frozenset()), request, random_machine(seed)


@pytest.mark.parametrize("seed", [6001, 6003, 6004, 6005, 6012, 6013, 6015])
def test_the_budget_that_is_named_works_and_with_one_byte_less_no_plan_is_found(seed):
    made, step, request, machine = _problem(seed)
    options = DynamicOptions(memory_bytes=1)
    error = shortfall.infeasible(step, request, machine, options, plan_dynamic(step, request, machine, options))
    budget = int(re.search(r"need: +memory_bytes=(\d+)", str(error)).group(1))
    enough = plan_dynamic(step, request, machine, DynamicOptions(memory_bytes=budget))
    peak = price(made.graph, made.scopes, made.loose, (), enough.assignment, request.mesh, machine).memory_bytes
    assert peak == budget
    assert isinstance(plan_dynamic(step, request, machine, DynamicOptions(memory_bytes=budget - 1)), Shortfall)


@pytest.mark.parametrize("seed", [6101, 6102, 6103, 6105])
def test_no_plan_at_all_fits_in_less_than_what_is_said_to_be_alive_at_least(seed):
    made, step, request, machine = _problem(seed)
    found = plan_dynamic(step, request, machine, DynamicOptions(memory_bytes=1))
    assert found.is_proven
    conditions = Conditions(memory_bytes=found.least_bytes - 1, count_copies=True)
    assert exhaustive(made.graph, made.scopes, made.loose, request.mesh, machine, conditions) is None


def test_what_is_not_proven_is_not_said(monkeypatch):
    monkeypatch.setattr(shortfall, "_enough_bytes", lambda *_: 1)
    _, step, request, machine = _problem(6101)
    options = DynamicOptions(memory_bytes=1)
    found = plan_dynamic(step, request, machine, options)
    assert "No plan on" in (proven := str(shortfall.infeasible(step, request, machine, options, found)))
    assert "at least" in proven
    other = str(shortfall.infeasible(step, request, machine, options, found._replace(is_proven=False)))
    assert "No plan was found on" in other
    assert "at least" not in other
