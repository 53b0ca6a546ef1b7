"""The budget that an error names works, and none below it is found to."""

import re

import pytest

from spmdctx.search import shortfall
from spmdctx.search.dynamic import DynamicOptions, Shortfall, Step, plan_dynamic
from spmdctx.search.modes import Request
from spmdctx.search.price import price
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
