"""The budget that an error names works, and none below it is found to."""

import re
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spmdctx.cost.price import price
from spmdctx.cost.step import Step, bill_of
from spmdctx.search.dynamic import run as run_module
from spmdctx.search.dynamic import shortfall
from spmdctx.search.dynamic.results import DynamicOptions, Found, Shortfall
from spmdctx.search.dynamic.searcher import Searcher, plan_dynamic
from spmdctx.search.select import SearchOptions, _quick, search
from spmdctx.search.setup.request import Request
from spmdctx.search.solver.problem.problem import Infeasible
from tests.oracles.exhaustive import Conditions, exhaustive
from tests.search.random_graphs import fused, random_machine, random_mesh, random_step


def _request(num_devices, mesh=None):
    return Request("auto_parallel", num_devices, mesh, None, (), frozenset(), (), (), frozenset())


def _never(devices, memory_bytes):
    """A quick search that finds no plan."""
    return False


def _budgets(step, request, machine, options):
    return Searcher(step, machine, options).budgets(request)


def _problem(seed):
    """A small step, a request on one mesh, and a machine."""
    made, mesh = random_step(seed, 4), random_mesh(seed)
    made = fused(made) if seed % 2 else made
    return made, Step(made.graph, made.scopes, made.from_literals, frozenset()), _request(mesh.num_devices, mesh), random_machine(seed)


@pytest.mark.parametrize("seed", [6003, 6004, 6005, 6012, 6013, 6014])
def test_the_budget_that_is_named_works_and_with_one_byte_less_no_plan_is_found(seed):
    made, step, request, machine = _problem(seed)
    options = DynamicOptions(memory_bytes=1)
    error = shortfall.infeasible(
        step, request, machine, options, plan_dynamic(step, request, machine, options), _budgets(step, request, machine, options), _never
    )
    budget = int(re.search(r"need: +memory_bytes=(\d+)", str(error)).group(1))
    enough = plan_dynamic(step, request, machine, DynamicOptions(memory_bytes=budget))
    peak = price(Step(made.graph, made.scopes, made.from_literals), enough.assignment, request.mesh, machine).safe_bytes
    assert peak == budget
    assert isinstance(plan_dynamic(step, request, machine, DynamicOptions(memory_bytes=budget - 1)), Shortfall)


def test_where_the_solver_knows_of_nothing_that_is_enough_the_fastest_plan_is(monkeypatch):
    _, step, request, machine = _problem(6004)
    free = plan_dynamic(step, request, machine, DynamicOptions())
    peak = bill_of(step, free.assignment, request.mesh, machine).safe_bytes
    missing = Infeasible(0, float("inf"), float("inf"), is_proven=False, lower_bound=free.cost_s)
    monkeypatch.setattr(run_module, "solve", lambda *args, **how: missing)
    found = plan_dynamic(step, request, machine, DynamicOptions(memory_bytes=peak - 1))
    assert (found.least_bytes, found.enough_bytes, found.is_proven) == (peak, peak, False)
    assert found.lower_bound_s == pytest.approx(free.cost_s)


def _tight(seed, small):
    """A step on 2 devices, and a budget of three tenths of what its fastest plan takes; `small` are the ops of a small program."""
    made, machine = random_step(seed, 6), random_machine(seed)
    step = Step(made.graph, made.scopes, made.from_literals, frozenset())
    free = plan_dynamic(step, _request(2), machine, DynamicOptions(small_program=small))
    peak = price(Step(made.graph, made.scopes, made.from_literals), free.assignment, free.setup.mesh, machine).safe_bytes
    return step, machine, DynamicOptions(memory_bytes=int(peak * 0.3), small_program=small)


@pytest.mark.parametrize(("small", "seeds"), [(0, range(6200, 6212)), (100, (6202, 6203, 6205))])
def test_the_number_of_devices_that_is_named_is_the_first_doubling_with_a_plan(small, seeds):
    axes = set()
    for seed in seeds:
        step, machine, options = _tight(seed, small)
        count = shortfall._enough_devices(step, _request(2), machine, options, _never)
        if count is None:
            continue
        enough = plan_dynamic(step, _request(count), machine, options)
        assert not isinstance(enough, Shortfall), seed
        axes.add(len(enough.setup.mesh.axes))
        if small and count > 4:
            assert isinstance(plan_dynamic(step, _request(count // 2), machine, options), Shortfall), seed
    assert max(axes) > 1


def test_what_is_named_for_a_larger_program_works_and_is_mostly_near_the_least():
    excess = []
    for seed in range(6200, 6212):
        step, machine, options = _tight(seed, 0)
        found, asked = plan_dynamic(step, _request(2), machine, options), SearchOptions("dynamic_programming", machine)
        if isinstance(found, Shortfall):
            quick, budgets = _quick(step, _request(2), asked), _budgets(step, _request(2), machine, options)
            budget, _ = shortfall._enough_bytes(step, _request(2), machine, options, found, budgets, quick)
            chosen = search(step, _request(2), replace(asked, memory_bytes=budget))
            assert bill_of(step, chosen.assignment, chosen.setup.mesh, machine).safe_bytes <= budget, seed
            excess.append(budget / found.least_bytes - 1)
            count = shortfall._enough_devices(step, _request(2), machine, options, quick)
            assert count is None or search(step, _request(count), replace(asked, memory_bytes=options.memory_bytes)), seed
    assert len(excess) > 5
    assert statistics.median(excess) < 0.1


@pytest.mark.parametrize(
    ("quick_from", "slow_from", "named", "searched"),
    [(0.61, 0.61, 0.625, 0), (0.61, 0.9, 0.625, 0), (0.85, 0.85, 0.85, 1), (0.85, 0.7, 0.725, 1), (1.0, 0.9, 1.0, 1)],
    ids=["both find all", "the quick one finds all", "it finds little", "the other finds more", "none finds any"],
)
def test_of_a_larger_program_quick_searches_come_first(monkeypatch, quick_from, slow_from, named, searched):
    """The numbers are shares of the fastest plan's bytes; less than 0.6 is proven to be too little."""
    fastest, tried = 10**6, []

    def within(options):
        tried.append(options.memory_bytes)
        missing = Shortfall(0, fastest, fastest, None)
        return missing if options.memory_bytes < slow_from * fastest else Found(None, None, 1.0, 1.0, {})

    monkeypatch.setattr(shortfall, "_peak_bytes", lambda step, topology, found: fastest)
    step = SimpleNamespace(graph=SimpleNamespace(ops=range(200)))
    found = Shortfall(0, 600_001, 600_001, None, is_proven=True)
    budgets, options = SimpleNamespace(spent=0.0, within=within), DynamicOptions(memory_bytes=500_000)
    enough, is_whole = shortfall._enough_bytes(
        step, _request(2), None, options, found, budgets, lambda devices, budget: budget >= quick_from * fastest
    )
    assert (enough / fastest, len(tried)) == (pytest.approx(named, abs=1e-5), searched)
    assert not is_whole


@pytest.mark.parametrize("seed", [6101, 6102, 6103, 6105])
def test_no_plan_at_all_fits_in_less_than_what_is_said_to_be_alive_at_least(seed):
    made, step, request, machine = _problem(seed)
    found = plan_dynamic(step, request, machine, DynamicOptions(memory_bytes=1))
    assert found.is_proven
    conditions = Conditions(memory_bytes=found.least_bytes - 1, count_copies=True)
    assert exhaustive(made.graph, made.scopes, made.from_literals, request.mesh, machine, conditions) is None


def test_what_is_not_proven_is_not_said(monkeypatch):
    monkeypatch.setattr(shortfall, "_enough_bytes", lambda *_: (1, True))
    _, step, request, machine = _problem(6101)
    options = DynamicOptions(memory_bytes=1)
    found = plan_dynamic(step, request, machine, options)
    budgets = _budgets(step, request, machine, options)
    assert "No plan on" in (proven := str(shortfall.infeasible(step, request, machine, options, found, budgets, _never)))
    assert "at least" in proven
    other = str(shortfall.infeasible(step, request, machine, options, found._replace(is_proven=False), budgets, _never))
    assert "No plan was found on" in other
    assert "at least" not in other


@pytest.mark.parametrize("between", [True, False])
def test_an_error_says_where_only_the_safe_end_is_over_the_budget(between):
    _, step, request, machine = _problem(6004)
    machine = replace(machine, device="tpu-v5e")
    free = plan_dynamic(step, request, machine, DynamicOptions())
    bill = bill_of(step, free.assignment, request.mesh, machine)
    assert bill.safe_bytes > bill.memory_bytes
    options = DynamicOptions(memory_bytes=bill.memory_bytes if between else bill.memory_bytes - 1, is_brief=True)
    found = Shortfall(0, bill.safe_bytes, bill.safe_bytes, is_proven=False, fastest=free, lower_bound_s=free.cost_s)
    error = shortfall.infeasible(step, request, machine, options, found, _budgets(step, request, machine, options), _never)
    assert ("the fastest plan likely takes" in str(error)) == between
