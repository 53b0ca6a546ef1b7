"""The order in which meshes with the same axes are searched, and where searches within memory begin."""

import math
from dataclasses import replace

import pytest

from spmdctx.cost.step import Step, bill_of
from spmdctx.search.dynamic import effort
from spmdctx.search.dynamic import searcher as searcher_module
from spmdctx.search.dynamic.budget import Budget
from spmdctx.search.dynamic.mesh_search import MeshSearch
from spmdctx.search.dynamic.results import DynamicOptions, Shortfall, short_of
from spmdctx.search.dynamic.run import Run
from spmdctx.search.dynamic.searcher import plan_dynamic
from spmdctx.search.problem.orbits import Precedents
from spmdctx.search.setup.request import Request
from spmdctx.search.solver.limited.constrained import Constrained
from spmdctx.search.solver.problem.graph import cost_of
from tests.search.random_graphs import random_machine, random_step


def test_the_order_on_which_the_joint_choice_costs_less_comes_first(monkeypatch):
    monkeypatch.setattr(searcher_module, "_MANY_SIZES", 2)
    sort, sorted_first, searched = MeshSearch.cheaper_first, [], []
    search = MeshSearch.fastest_on

    def cheaper_first(self, setups):
        result = sort(self, setups)
        costs = {mesh: cost_of(own.problem.costs, own.problem.edges, own.states) for mesh, own in self._choices.items()}
        assert [own.mesh for own in result[: len(costs)]] == sorted(costs, key=costs.__getitem__)
        sorted_first.append((result[0].mesh, result[0].mesh != setups[0].mesh))
        return result

    def fastest_on(self, setup, known_s):
        searched.append(setup.mesh)
        return search(self, setup, known_s)

    monkeypatch.setattr(MeshSearch, "cheaper_first", cheaper_first)
    monkeypatch.setattr(MeshSearch, "fastest_on", fastest_on)
    for seed in range(6000, 6040):
        made = random_step(seed)
        step = Step(made.graph, made.scopes, made.from_literals, frozenset())
        sorted_first.clear()
        searched.clear()
        plan_dynamic(
            step,
            Request("auto_parallel", 16, None, None, (), frozenset(), (), (), frozenset()),
            random_machine(seed),
            DynamicOptions(max_axes=2, small_program=0),
        )
        for mesh, is_exchanged in sorted_first:
            others = [other for other in searched if sorted(other.shape) == sorted(mesh.shape)]
            assert others[0] == mesh
            if is_exchanged:
                return
    raise AssertionError("no second order was cheaper")


def test_plans_of_first_looks_rule_out_meshes_that_are_searched_before(monkeypatch):
    looked_s, known, orders = {}, {}, []
    look, search = MeshSearch.first_look, MeshSearch.fastest_on

    def first_look(self, setup, known_s=math.inf):
        found = look(self, setup, known_s)
        looked_s[setup.mesh] = found.cost
        if len(setup.mesh.axes) > 1:
            # Such a bound is as true, and as low as those of large programs.
            found = found._replace(lower_bound=found.lower_bound / 2)
            self._begun[setup.mesh] = self._begun[setup.mesh]._replace(solution=found)
        return found

    def fastest_on(self, setup, known_s):
        known[setup.mesh] = known_s
        orders.append(setup.mesh)
        return search(self, setup, known_s)

    for seed in range(7000, 7020):
        made = random_step(seed, 12)
        step = Step(made.graph, made.scopes, made.from_literals, frozenset())
        request = Request("auto_parallel", 16, None, None, (), frozenset(), (), (), frozenset())
        truth = plan_dynamic(step, request, random_machine(seed), DynamicOptions(max_axes=2))
        with monkeypatch.context() as patch:
            patch.setattr(MeshSearch, "first_look", first_look)
            patch.setattr(MeshSearch, "fastest_on", fastest_on)
            for past in (looked_s, known, orders):
                past.clear()
            found = plan_dynamic(step, request, random_machine(seed), DynamicOptions(max_axes=2))
        assert found.cost_s == pytest.approx(truth.cost_s, rel=1e-9)
        for place, mesh in enumerate(orders):
            to_come = [looked_s[other] for other in orders[place + 1 :] if other in looked_s]
            assert known[mesh] <= min(to_come, default=math.inf) * (1 + 1e-8)
    assert len(orders) > 2


def _within(seed, num_ops, num_devices, share):
    """A random step with a request, a machine, and a budget: a share of the peak of the fastest plan."""
    made, machine = random_step(seed, num_ops), random_machine(seed)
    step = Step(made.graph, made.scopes, made.from_literals, frozenset())
    request = Request("auto_parallel", num_devices, None, None, (), frozenset(), (), (), frozenset())
    free = plan_dynamic(step, request, machine, DynamicOptions(small_program=0))
    return step, request, machine, int(share * bill_of(step, free.assignment, free.setup.mesh, machine).safe_bytes)


def test_a_search_begins_with_the_plan_of_a_program_alike_and_ends_with_one_as_near(monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    monkeypatch.setattr("spmdctx.search.solver.limited.constrained.is_narrow", lambda graph: False)
    monkeypatch.setattr(Constrained, "_is_closable", lambda self, graph: False)
    begun, tried = 0, [0, 0]
    for seed in range(6100, 6130):
        step, request, machine, budget = _within(seed, 12, 4, 0.8)
        options = DynamicOptions(memory_bytes=budget, is_soft=True, small_program=0, large_program=0)
        first, precedents = plan_dynamic(step, request, machine, options), Precedents()
        found = [plan_dynamic(step, request, machine, replace(options, precedents=precedents)) for _ in range(2)]
        if isinstance(first, Shortfall):
            continue
        assert found[0].cost_s == first.cost_s
        again = found[1]
        assert bill_of(step, again.assignment, again.setup.mesh, machine).safe_bytes <= options.memory_bytes
        assert again.lower_bound_s <= first.cost_s * (1 + 1e-9)
        assert again.cost_s <= first.cost_s * 1.06
        begun += 1
        tried = [count + own.counts.get("prices", 0) for count, own in zip(tried, found, strict=True)]
    assert begun >= 5
    assert tried[1] < tried[0]


def test_a_poor_plan_of_the_starts_is_kept_where_no_attempt_finds_one(monkeypatch):
    """Attempts are blind here; only what begins at the plan of a program alike finds one."""
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    monkeypatch.setattr("spmdctx.search.solver.limited.constrained.is_narrow", lambda graph: False)
    monkeypatch.setattr(Constrained, "_is_closable", lambda self, graph: False)
    monkeypatch.setattr("spmdctx.search.dynamic.mesh_search._AS_NEAR", 1e-6)
    result, kept = Run.result, 0
    for seed in range(6100, 6130):
        step, request, machine, budget = _within(seed, 12, 4, 0.8)
        options = DynamicOptions(memory_bytes=budget, is_soft=True, small_program=0, large_program=0, precedents=Precedents())
        first = plan_dynamic(step, request, machine, options)
        if isinstance(first, Shortfall) or first.cost_s == first.lower_bound_s:
            continue

        def blind(self):
            found = result(self)
            return found if self._mesh.near == 1.0 else short_of(self._budget.fastest_peak, self._mesh.fastest, 0.0)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "result", blind)
            again = plan_dynamic(step, request, machine, options)
        if isinstance(again, Shortfall):
            continue
        assert bill_of(step, again.assignment, again.setup.mesh, machine).safe_bytes <= budget
        kept += 1
    assert kept >= 3


def test_a_plan_that_was_tried_by_itself_is_no_precedent():
    """The search for any plan branches here, and its plan leaves no states."""
    step, request, machine, budget = _within(4528, 5, 4, 0.85)
    blind = effort.HASTY._replace(rounds=1, hopeless=0.0)
    attempts = (effort.Attempt(blind, effort.first_of_all), effort.Attempt(effort.HASTY, effort.first_beside_others))
    schedule, precedents = effort.QUICK_PLAN._replace(attempts=attempts), Precedents()
    options = DynamicOptions(memory_bytes=budget, is_soft=True, small_program=0, schedule=schedule, precedents=precedents)
    found = plan_dynamic(step, request, machine, options)
    assert bill_of(step, found.assignment, found.setup.mesh, machine).safe_bytes <= budget


def test_a_mesh_where_a_program_alike_has_no_plan_is_left_out_if_another_has_one(monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    searched, run = list[tuple[int, ...]](), Budget.search_on
    monkeypatch.setattr(Budget, "search_on", lambda self, own, known_s: searched.append(own.tables.space.mesh) or run(self, own, known_s))
    left_out = 0
    for seed in range(6200, 6230):
        step, request, machine, budget = _within(seed, 12, 8, 0.6)
        options = DynamicOptions(memory_bytes=budget, is_soft=True, small_program=0, large_program=0)
        precedents, found, meshes = Precedents(), [], []
        for _ in range(2):
            searched.clear()
            found.append(plan_dynamic(step, request, machine, replace(options, precedents=precedents)))
            meshes.append(set(searched))
        if isinstance(found[0], Shortfall):
            assert meshes[1] == meshes[0]
            continue
        assert found[1].cost_s <= found[0].cost_s * 1.06
        assert found[1].lower_bound_s <= found[0].cost_s * (1 + 1e-9)
        left_out += len(meshes[0] - meshes[1])
    assert left_out
