"""dynamic_programming against the truth: the cheapest of all assignments of random graphs."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spmdctx.cost.evaluate import evaluate
from spmdctx.cost.price import price
from spmdctx.cost.step import Step, bill_of
from spmdctx.errors import UnsupportedError
from spmdctx.ir.mesh import AnyOrder
from spmdctx.search.dynamic import effort
from spmdctx.search.dynamic import run as run_module
from spmdctx.search.dynamic import searcher as searcher_module
from spmdctx.search.dynamic.budget import Budget
from spmdctx.search.dynamic.effort import PROVEN, PROVEN_PLAN, THOROUGH, THOROUGH_PLAN, Attempt, Limits, Schedule, unsettled
from spmdctx.search.dynamic.mesh_search import MeshSearch
from spmdctx.search.dynamic.results import Beaten, DynamicOptions, Found, Shortfall
from spmdctx.search.dynamic.searcher import Budgets, Searcher, plan_dynamic
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.meshes import candidate_meshes, sizes_of
from spmdctx.search.setup.request import Request, Setup
from spmdctx.search.solver.limited.constrained import Constrained
from tests.oracles import exhaustive_tables
from tests.oracles.exhaustive import Conditions, exhaustive
from tests.search.random_graphs import fused, random_machine, random_mesh, random_pins, random_step

TOGETHER = 10
"""Graphs of one test."""

LARGE = DynamicOptions(small_program=0)
"""Options for which no program is small."""

LIMITS = (
    AlgoLimits(fully_use_devices=True),
    AlgoLimits(elementwise_follow=True),
    AlgoLimits(slice_multiple=16),
    AlgoLimits(fully_use_devices=True, elementwise_follow=True),
)


def _step(made):
    return Step(made.graph, made.scopes, made.from_literals, frozenset())


def _search(made, mesh, machine, setup=None, limits=None, memory_bytes=None):
    options = DynamicOptions(memory_bytes=memory_bytes, limits=limits or AlgoLimits())
    return Searcher(_step(made), machine, options).search(setup or Setup(mesh))


def _check(made, mesh, machine, setup=None, limits=None):
    """Both searches find the same seconds, which are those of the plan by `evaluate` and by the bill."""
    found = _search(made, mesh, machine, setup, limits)
    pins = {**setup.pins, **setup.partial_pins} if setup else {}
    conditions = Conditions(pins=pins, limits=limits or AlgoLimits())
    truth = exhaustive(made.graph, made.scopes, made.from_literals, mesh, machine, conditions)
    assert found.cost_s == pytest.approx(truth.cost_s, rel=1e-9)
    assert found.lower_bound_s <= truth.cost_s * (1 + 1e-9)
    pinned = frozenset(pins)
    assert evaluate(made.graph, made.scopes, made.from_literals, found.assignment, mesh, machine, pinned).total_s == pytest.approx(
        found.cost_s, rel=1e-9
    )
    return found


@pytest.mark.parametrize("first", range(0, 200, TOGETHER))
def test_the_plan_is_the_cheapest_of_all(first):
    for seed in range(first, first + TOGETHER):
        made, mesh, machine = random_step(seed), random_mesh(seed), random_machine(seed)
        found = _check(made, mesh, machine)
        bill = price(Step(made.graph, made.scopes, made.from_literals), found.assignment, mesh, machine)
        assert bill.compute_s + bill.exposed_communication_s <= found.cost_s * (1 + 1e-9)


@pytest.mark.parametrize(("seed", "num_ops"), [(3068, 4), (20156, 6), (20315, 6), (20441, 6), (21422, 6), (22913, 6)])
def test_seconds_that_were_once_counted_otherwise_by_one_of_three_are_equal(seed, num_ops):
    # A sum that is moved on the way to the next one; an operand that a product takes in two shardings; copies that products share
    # which all take alike.
    made, mesh, machine = random_step(seed, num_ops), random_mesh(seed), random_machine(seed)
    made = fused(made) if seed % 2 else made
    found = _check(made, mesh, machine)
    bill = price(Step(made.graph, made.scopes, made.from_literals), found.assignment, mesh, machine)
    assert bill.compute_s + bill.exposed_communication_s <= found.cost_s * (1 + 1e-9)


@pytest.mark.parametrize("first", range(1000, 1080, TOGETHER))
def test_the_plan_is_the_cheapest_that_keeps_the_pins(first):
    for seed in range(first, first + TOGETHER):
        made, mesh = random_step(seed), random_mesh(seed)
        setup = random_pins(made, mesh, seed)
        found = _check(made, mesh, random_machine(seed), setup)
        assert all(found.assignment.values[value] == own for value, own in setup.pins.items())


@pytest.mark.parametrize("limits", LIMITS, ids=["all_devices", "follow", "aligned", "all_devices_and_follow"])
@pytest.mark.parametrize("first", range(2000, 2020, TOGETHER))
def test_the_plan_is_the_cheapest_that_the_parameters_allow(first, limits):
    for seed in range(first, first + TOGETHER):
        made, mesh = random_step(seed), random_mesh(seed)
        found = _check(made, mesh, random_machine(seed), None, limits)
        for op in made.graph.ops:
            if not made.from_literals.issuperset(op.results) or not op.results:
                stored = [() if value < 0 else found.assignment.values[value] for value in op.operands]
                axes = found.assignment.ops[op.id].axes
                follows = made.from_literals.isdisjoint(op.operands)
                assert limits.allows(op, axes, mesh, stored if follows else None)


@pytest.mark.parametrize("first", range(3000, 3120, 3 * TOGETHER))
def test_the_plan_is_the_cheapest_in_a_budget(first, monkeypatch):
    monkeypatch.setattr(exhaustive_tables, "MOST_CHOICES", 600)
    compared = 0
    for seed in range(first, first + 3 * TOGETHER):
        made, mesh, machine = random_step(seed, 4), random_mesh(seed), random_machine(seed)
        if made.from_literals:
            continue
        if seed % 2:
            machine = replace(machine, device="h100")  # its temporaries may be larger than foreseen
        free = _search(made, mesh, machine)
        peak = price(Step(made.graph, made.scopes, made.from_literals), free.assignment, mesh, machine).safe_bytes
        budget = int(peak * random.Random(seed).choice((0.95, 0.9, 0.7)))
        found = _search(made, mesh, machine, memory_bytes=budget)
        try:
            truth = exhaustive(
                made.graph, made.scopes, made.from_literals, mesh, machine, Conditions(memory_bytes=budget, count_copies=True)
            )
        except UnsupportedError:
            continue  # too many plans cost less and do not fit
        compared += 1
        if truth is None:
            assert isinstance(found, Shortfall), seed
            continue
        assert not isinstance(found, Shortfall), seed
        assert found.cost_s == pytest.approx(truth.cost_s, rel=1e-9), seed
        assert found.lower_bound_s <= truth.cost_s * (1 + 1e-9), seed
    assert compared >= 2


def test_no_limit_is_tried_of_which_the_solver_has_said_that_it_is_too_low(monkeypatch):
    tried, within = [], Budget.solve_within

    def recorded(self, problem, *rest):
        found, limit = within(self, problem, *rest), problem.memory.limit
        tried.append((limit, found.enough_bytes - (self.memory_bytes - limit) if isinstance(found, Shortfall) else 0))
        return found

    def forgotten(self):
        # What was said of rows that count reserved memory says nothing of those that do not.
        checked()
        tried.clear()
        without_reserved(self)

    def checked():
        for place, (_, enough) in enumerate(tried):
            # What is enough is whole bytes.
            assert all(limit > enough - 1 for limit, _ in tried[place + 1 :]), seed
        return sum(bool(enough) for _, enough in tried[:-1])

    without_reserved = Limits.without_reserved
    monkeypatch.setattr(Budget, "solve_within", recorded)
    monkeypatch.setattr(Limits, "without_reserved", forgotten)
    schedule = Schedule((Attempt(PROVEN._replace(branches=False, proves=False)),))
    times = 0
    for seed in range(3000, 3000 + 6 * TOGETHER):
        made, mesh, machine = random_step(seed, 8), random_mesh(seed), random_machine(seed)
        tried.clear()
        peak = _peak(made, mesh, machine, _search(made, mesh, machine).assignment)
        options = DynamicOptions(memory_bytes=int(peak * 0.8), schedule=schedule)
        Searcher(_step(made), machine, options).search(Setup(mesh))
        times += checked()
    assert times


def _peak(made, mesh, machine, assignment):
    return price(Step(made.graph, made.scopes, made.from_literals), assignment, mesh, machine).safe_bytes


def _step_on(seed):
    """A step of four ops, in every other case as the compiler fuses it, and a machine for it."""
    made = random_step(seed, 4)
    return fused(made) if seed % 2 else made, random_mesh(seed), random_machine(seed)


def _check_budget(made, mesh, machine, budget):
    """Whether there is a plan in the budget that is known to be the cheapest, or none; None where that would take too long to know."""
    try:
        truth = exhaustive(made.graph, made.scopes, made.from_literals, mesh, machine, Conditions(memory_bytes=budget, count_copies=True))
    except UnsupportedError:
        return None  # too many plans cost less and do not fit
    found = _search(made, mesh, machine, memory_bytes=budget)
    assert isinstance(found, Shortfall) == (truth is None), (budget, truth)
    if truth is None:
        return False
    assert found.cost_s == pytest.approx(truth.cost_s, rel=1e-9), budget
    assert found.lower_bound_s <= truth.cost_s * (1 + 1e-9), budget
    assert _peak(made, mesh, machine, found.assignment) <= budget
    return True


@pytest.mark.parametrize("first", range(5000, 5120, TOGETHER))
def test_the_plan_is_the_cheapest_in_every_budget_below_the_fastest_plan_s_peak(first, monkeypatch):
    _check_budgets(range(first, first + TOGETHER), 0.0, monkeypatch)


@pytest.mark.parametrize("share", [0.4, 1.5, 9.0])
def test_what_may_be_on_the_chip_is_left_out_of_the_budget_as_in_the_bill(share, monkeypatch):
    _check_budgets(range(5200, 5200 + TOGETHER), share, monkeypatch)


def _check_budgets(seeds, on_chip, monkeypatch):
    """Budgets of steps on machines whose chips hold so large a share of what the fastest plan takes."""
    monkeypatch.setattr(exhaustive_tables, "MOST_CHOICES", 300)
    outcomes = []
    for seed in seeds:
        made, mesh, machine = _step_on(seed)
        if on_chip:
            peak = _peak(made, mesh, machine, _search(made, mesh, machine).assignment)
            machine = replace(machine, scratch_bytes=round(on_chip * peak))
        if made.from_literals:
            continue
        peak = _peak(made, mesh, machine, _search(made, mesh, machine).assignment)
        least = _search(made, mesh, machine, memory_bytes=1).least_bytes
        if least < peak - 1:
            middle = (least + peak) // 2
            outcomes += [
                _check_budget(made, mesh, machine, random.Random(seed).randrange(middle, peak)),
                _check_budget(made, mesh, machine, peak - 1),
            ]
    assert outcomes.count(True) >= 2


@pytest.mark.parametrize(
    ("seed", "budget"),
    [
        (3098, 99920),
        (5010, 3113),
        (5088, 29752),
        (5160, 24959),
        (5257, 11643),
        (5292, 10688),
        (30183, 6160),
        (30265, 265749),
        (50034, 36255),
        (960191, 53503),
        (960218, 2009),
        (980211, 9656),
        (1000134, 32479),
        (1000284, 24799),
    ],
)
def test_nothing_is_counted_that_a_plan_does_not_hold(seed, budget, monkeypatch):
    # Narrow copies, partial results, slices of what others gather, partial results of fused ops, a value that an op takes twice,
    # sums of partial results before they are scattered; one of which the proof takes more than the
    # usual effort; one where too many that do not fit come first; two whose first plan that fits is not the cheapest; a sum that is
    # scattered to its readers; what a GPU's schedule keeps for less time; and one whose search is cut in the part of the cheapest plan.
    monkeypatch.setattr(exhaustive_tables, "MOST_CHOICES", 4000)
    made = random_step(seed, 4)
    assert _check_budget(fused(made) if seed % 2 and seed > 5000 else made, random_mesh(seed), random_machine(seed), budget)


def _request(num_devices):
    return Request("auto_parallel", num_devices, None, None, (), frozenset(), (), (), frozenset())


@pytest.mark.parametrize("seed", range(4000, 4012))
def test_the_best_mesh_is_the_best_of_all_meshes(seed):
    made, machine = random_step(seed), random_machine(seed)
    found = plan_dynamic(_step(made), _request(4), machine, DynamicOptions())
    truths = [exhaustive(made.graph, made.scopes, made.from_literals, mesh, machine) for mesh in (random_mesh(3), random_mesh(6))]
    assert [mesh.shape for mesh in (random_mesh(3), random_mesh(6))] == [(4,), (2, 2)]
    assert found.cost_s == pytest.approx(min(truth.cost_s for truth in truths), rel=1e-6)
    assert found.lower_bound_s <= min(truth.cost_s for truth in truths) * (1 + 1e-9)


def test_a_budget_is_tried_only_on_meshes_where_it_may_pay(monkeypatch):
    looked, search_on = [], Budget.search_on

    def recorded(self, mesh, known_s):
        assert mesh.lower_bound_s < known_s
        if self.schedule.attempts == PROVEN_PLAN.attempts:
            looked.append(mesh.fastest.setup.mesh)
        return search_on(self, mesh, known_s)

    monkeypatch.setattr(Budget, "search_on", recorded)
    spared = 0
    for seed in range(4300, 4300 + TOGETHER):
        looked.clear()
        made, machine = random_step(seed), random_machine(seed)
        step, request = _step(made), _request(4)
        free = plan_dynamic(step, request, machine, DynamicOptions())
        peak = bill_of(step, free.assignment, free.setup.mesh, machine).safe_bytes
        plan_dynamic(step, request, machine, DynamicOptions(memory_bytes=peak - 1))
        spared += len(looked) < len(candidate_meshes(4, machine))
    assert spared


def test_a_mesh_gets_more_effort_only_after_the_others_were_tried_with_little(monkeypatch):
    turns, order = [], ["search_on", "search_later"]

    def recording(name, run):
        def recorded(self, mesh, known_s):
            turns.append(name)
            return run(self, mesh, known_s)

        return recorded

    for name in order:
        monkeypatch.setattr(Budget, name, recording(name, getattr(Budget, name)))
    later = 0
    for seed in range(4700, 4700 + TOGETHER):
        made, machine = random_step(seed, 8), random_machine(seed)
        free = plan_dynamic(_step(made), _request(4), machine, LARGE)
        budget = int(_peak(made, free.setup.mesh, machine, free.assignment) * 0.8)
        turns.clear()
        found = plan_dynamic(_step(made), _request(4), machine, replace(LARGE, memory_bytes=budget, schedule=THOROUGH_PLAN))
        assert turns == sorted(turns, key=order.index) or isinstance(found, Shortfall)
        later += "search_later" in turns
    assert later


@pytest.mark.parametrize("is_seen_first", [False, True])
def test_a_mesh_without_a_plan_is_searched_again_only_where_no_other_mesh_had_one(is_seen_first):
    with_plan, without = (SimpleNamespace(mesh=random_mesh(number)) for number in (3, 6))
    searched = []

    def within(_budget, fastest, _known_s, _bound_s, **how):
        searched.append((fastest.setup, how["is_later"]))
        found = fastest._replace(cost_s=3.0, lower_bound_s=2.0)
        return found if fastest.setup is with_plan else Shortfall(0, 9, 9, fastest, is_cut=True)

    budgets = object.__new__(Budgets)
    budgets._meshes = SimpleNamespace(within=within, is_small=True)
    first, second = (with_plan, without) if is_seen_first else (without, with_plan)
    budgets._setups, budgets._bounds = [first, second], {with_plan.mesh: 1.0, without.mesh: 1.0}
    budgets._fastest, budgets._best = Found(first, None, 1.0, 1.0, {}), None
    schedule = Schedule((Attempt(THOROUGH),))
    options = SimpleNamespace(memory_bytes=8, is_soft=True)
    found = budgets._cheapest(SimpleNamespace(schedule=schedule, options=options, costs_s={}))
    assert found.setup is with_plan
    assert searched == [(first, False), (second, False), *([] if is_seen_first else [(without, False)])]


@pytest.mark.parametrize(("cost_s", "is_small", "order"), [(3.0, False, [0, 2]), (1.1, False, [0, 1, 2]), (3.0, True, [0, 1, 2])])
def test_where_a_first_plan_is_far_from_the_fastest_its_prices_sort_the_meshes(cost_s, is_small, order):
    setups = [SimpleNamespace(mesh=random_mesh(number)) for number in (3, 6, 9)]
    costs, at_prices, searched = [cost_s, 2.9, 1.05], [None, 2.5, 1.01], []

    def within(_budget, fastest, *_, **__):
        searched.append(setups.index(fastest.setup))
        return fastest._replace(cost_s=costs[searched[-1]], lower_bound_s=1.0)

    def bound_within(_budget, fastest, *_):
        return at_prices[setups.index(fastest.setup)]

    budgets = object.__new__(Budgets)
    budgets._meshes = SimpleNamespace(within=within, bound_within=bound_within, is_small=is_small)
    budgets._setups, budgets._bounds = setups, {setup.mesh: 1.0 for setup in setups}
    budgets._fastest, budgets._best = Found(setups[0], None, 1.0, 1.0, {}), None
    options = SimpleNamespace(memory_bytes=8, is_soft=True)
    budget = SimpleNamespace(schedule=Schedule((Attempt(THOROUGH),)), options=options, costs_s={}, prices=((0, 1.0),))
    assert budgets._cheapest(budget).cost_s == 1.05
    assert searched == order


def test_bounds_at_prices_of_another_mesh_rule_out_no_cheaper_plan(monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    monkeypatch.setattr("spmdctx.search.solver.limited.constrained.is_narrow", lambda graph: False)
    monkeypatch.setattr(Constrained, "_is_closable", lambda self, graph: False)
    bounded, run = [], MeshSearch.bound_within
    monkeypatch.setattr(MeshSearch, "bound_within", lambda *given: bounded.append(run(*given)) or bounded[-1])
    for seed in range(4700, 4700 + 2 * TOGETHER):
        made, machine = random_step(seed, 12), random_machine(seed)
        free = plan_dynamic(_step(made), _request(16), machine, LARGE)
        options = replace(LARGE, memory_bytes=int(_peak(made, free.setup.mesh, machine, free.assignment) * 0.7), is_soft=True)
        found = []
        for far in (float("inf"), -1.0):
            monkeypatch.setattr(searcher_module, "FAR", far)
            found.append(plan_dynamic(_step(made), _request(16), machine, options))
        if not any(isinstance(own, Shortfall) for own in found):
            assert max(own.lower_bound_s for own in found) <= min(own.cost_s for own in found) * (1 + 1e-9), seed
    assert len(bounded) >= TOGETHER


def test_more_effort_for_a_plan_far_from_its_bound_finds_nothing_dearer(monkeypatch):
    efforts, run = [], run_module.solve

    def recorded(problem, **how):
        efforts.append(how.get("effort"))
        return run(problem, **how)

    monkeypatch.setattr(run_module, "solve", recorded)
    for seed in range(4600, 4600 + 2 * TOGETHER):
        made, machine = random_step(seed, 8), random_machine(seed)
        free = plan_dynamic(_step(made), _request(4), machine, LARGE)
        asked = replace(LARGE, memory_bytes=int(_peak(made, free.setup.mesh, machine, free.assignment) * 0.7))
        costs = []
        for insists in (float("inf"), -1.0):
            schedule = THOROUGH_PLAN._replace(later=(Attempt(THOROUGH._replace(insists=insists), unsettled),))
            efforts.clear()
            found = plan_dynamic(_step(made), _request(4), machine, replace(asked, schedule=schedule))
            costs.append(float("inf") if isinstance(found, Shortfall) else found.cost_s)
            assert insists < 0 or THOROUGH.level + 1 not in efforts
            assert isinstance(found, Shortfall) or found.lower_bound_s <= found.cost_s * (1 + 1e-9), seed
        assert costs[1] <= costs[0] * (1 + 1e-9), seed


def _truths_within(made, machine, budget):
    """The cheapest within a budget on each mesh of 4 devices that has one; None where that would take too long to know."""
    conditions = Conditions(memory_bytes=budget, count_copies=True)
    try:
        found = [
            exhaustive(made.graph, made.scopes, made.from_literals, mesh, machine, conditions) for mesh in candidate_meshes(4, machine)
        ]
    except UnsupportedError:
        return None  # too many plans cost less and do not fit
    return [truth.cost_s for truth in found if truth is not None]


@pytest.mark.parametrize("small", [0, 100])
@pytest.mark.parametrize("first", range(4400, 4520, 3 * TOGETHER))
def test_a_budget_that_nobody_set_is_met_where_a_short_search_finds_how(first, small, monkeypatch):
    monkeypatch.setattr(exhaustive_tables, "MOST_CHOICES", 600)
    options = DynamicOptions(small_program=small)
    met = 0
    for seed in range(first, first + 3 * TOGETHER):
        made, machine = random_step(seed, 4), random_machine(seed)
        if made.from_literals:
            continue
        free = plan_dynamic(_step(made), _request(4), machine, options)
        budget = int(_peak(made, free.setup.mesh, machine, free.assignment) * random.Random(seed).choice((0.9, 0.7, 0.5)))
        truths = _truths_within(made, machine, budget)
        if truths is None:
            continue
        found = plan_dynamic(_step(made), _request(4), machine, replace(options, memory_bytes=budget, is_soft=True))
        if isinstance(found, Shortfall):
            assert not (found.is_proven and truths), seed
            continue
        met += 1
        assert _peak(made, found.setup.mesh, machine, found.assignment) <= budget, seed
        assert found.lower_bound_s * (1 - 1e-9) <= min(truths) <= found.cost_s * (1 + 1e-9), seed
    assert met


@pytest.mark.parametrize(("seed", "share"), [(4543, 0.5), (4555, 0.7), (4589, 0.7), (4597, 0.7), (4598, 0.7)])
def test_a_budget_that_nobody_set_is_looked_for_on_every_mesh(seed, share):
    """On the mesh of the fastest plan none keeps to it, or none that is as cheap as one on another mesh."""
    made, machine = random_step(seed, 6), random_machine(seed)
    free = plan_dynamic(_step(made), _request(4), machine, LARGE)
    budget = int(_peak(made, free.setup.mesh, machine, free.assignment) * share)
    asked = replace(LARGE, memory_bytes=budget, is_soft=True, large_program=0)
    alone = plan_dynamic(_step(made), replace(_request(4), mesh=free.setup.mesh), machine, asked)
    found = plan_dynamic(_step(made), _request(4), machine, asked)
    assert isinstance(alone, Shortfall) or found.cost_s < alone.cost_s
    assert _peak(made, found.setup.mesh, machine, found.assignment) <= budget


@pytest.mark.parametrize("is_soft", [True, False])
@pytest.mark.parametrize("seed", [4555, 4598, 4658])
def test_a_poor_plan_of_the_search_for_any_is_where_others_start(seed, is_soft):
    """The hasty attempt gives up on every mesh, and the plan that a search for any finds is a third dearer than need be, or more."""
    made, machine = random_step(seed, 6), random_machine(seed)
    free = plan_dynamic(_step(made), _request(4), machine, LARGE)
    budget = int(_peak(made, free.setup.mesh, machine, free.assignment) * 0.7)
    blind, hasty = effort.HASTY._replace(rounds=1, hopeless=0.0), effort.HASTY._replace(tolerance=effort.QUICK.tolerance)
    attempts = [(blind, effort.first_of_all), (hasty, effort.first_beside_others), (effort.QUICK, effort.improvable)]
    schedule = effort.Schedule(tuple(effort.Attempt(*one) for one in attempts))
    asked = replace(LARGE, memory_bytes=budget, is_soft=is_soft)
    poor, found = (plan_dynamic(_step(made), _request(4), machine, replace(asked, schedule=own)) for own in (effort.ENOUGH_PLAN, schedule))
    assert found.cost_s < poor.cost_s / 1.3
    assert _peak(made, found.setup.mesh, machine, found.assignment) <= budget


@pytest.mark.parametrize("seed", [3012, 3022, 3029, 3047])
def test_a_mesh_is_left_once_its_plans_within_a_budget_cost_more_than_what_is_known(seed):
    made, mesh, machine = random_step(seed, 4), random_mesh(seed), random_machine(seed)
    free = _search(made, mesh, machine)
    searcher = Searcher(_step(made), machine, DynamicOptions(memory_bytes=int(_peak(made, mesh, machine, free.assignment) * 0.9)))
    within = searcher.search(Setup(mesh))
    known_s = (free.cost_s + within.lower_bound_s) / 2
    beaten = searcher.search(Setup(mesh), known_s)
    assert isinstance(beaten, Beaten)
    assert free.cost_s < known_s <= beaten.lower_bound_s <= within.lower_bound_s <= within.cost_s


def _on_meshes_of_three(seed):
    """Both the cheapest on each order of a mesh of three axes, and on all of them at once."""
    made, machine = random_step(seed), random_machine(seed)
    orders = [mesh for mesh in candidate_meshes(16, machine) if len(mesh.axes) == 3]
    found = [_search(made, mesh, machine) for mesh in orders]
    at_once = _search(made, AnyOrder.of_meshes(orders), machine) if orders else None
    return orders, found, at_once


@pytest.mark.parametrize("first", range(4100, 4130, TOGETHER))
def test_what_is_cheapest_on_any_order_of_a_mesh_is_a_bound_for_each(first):
    several = 0
    for seed in range(first, first + TOGETHER):
        orders, found, at_once = _on_meshes_of_three(seed)
        several += len(orders) > 1
        for own in found:
            assert at_once.lower_bound_s <= own.cost_s * (1 + 1e-9)
        if len(orders) == 1:
            assert at_once.cost_s == pytest.approx(found[0].cost_s, rel=1e-9)
    assert several >= TOGETHER // 2


@pytest.mark.parametrize(("small", "share"), [(0, 1e-3), (100, 1e-9)])
@pytest.mark.parametrize("seed", range(4200, 4206))
def test_meshes_of_three_axes_are_searched_as_far_as_they_are_worth(seed, small, share):
    made, machine = random_step(seed), random_machine(seed)
    found = plan_dynamic(_step(made), _request(16), machine, DynamicOptions(max_axes=3, small_program=small))
    truth = min(_search(made, mesh, machine).cost_s for mesh in candidate_meshes(16, machine))
    assert truth * (1 - 1e-9) <= found.cost_s <= truth * (1 + 2 * share)
    assert truth * (1 - 2 * share) <= found.lower_bound_s <= truth * (1 + 1e-9)


@pytest.mark.parametrize(("small", "share", "many"), [(0, 1e-3, 2), (0, 1e-3, 3), (100, 1e-9, 3)])
@pytest.mark.parametrize("first", range(6000, 6040, TOGETHER))
def test_orders_of_two_axes_that_are_beaten_together_hold_no_cheaper_plan(first, small, share, many, monkeypatch):
    monkeypatch.setattr(searcher_module, "_MANY_SIZES", many)
    bound_of, bounds = MeshSearch.bound_in_any_order, []

    def bound_in_any_order(self, setup, meshes, known_s):
        bounds.append((meshes, bound_of(self, setup, meshes, known_s)))
        return bounds[-1][1]

    of_joint, plans = MeshSearch._as_in_any_order, []

    def as_in_any_order(self, setup, alike, known_s):
        plans.append((setup.mesh, known_s, of_joint(self, setup, alike, known_s)))
        return plans[-1][-1]

    monkeypatch.setattr(MeshSearch, "bound_in_any_order", bound_in_any_order)
    monkeypatch.setattr(MeshSearch, "_as_in_any_order", as_in_any_order)
    for seed in range(first, first + TOGETHER):
        made, machine = random_step(seed), random_machine(seed)
        tried, taken = len(bounds), len(plans)
        found = plan_dynamic(_step(made), _request(16), machine, DynamicOptions(max_axes=2, small_program=small))
        costs_s = {mesh: _search(made, mesh, machine).cost_s for mesh in candidate_meshes(16, machine, 2)}
        truth = min(costs_s.values())
        assert truth * (1 - 1e-9) <= found.cost_s <= truth * (1 + 2 * share)
        assert found.lower_bound_s <= truth * (1 + 1e-9)
        for meshes, bound in bounds[tried:]:
            assert len(meshes) == 2
            assert bound is None or all(bound <= costs_s[mesh] * (1 + 1e-9) for mesh in meshes)
        for mesh, known_s, result in plans[taken:]:
            if isinstance(result, Found):
                assert costs_s[mesh] <= result.cost_s * (1 + 2e-9)
                assert result.cost_s == result.lower_bound_s or result.lower_bound_s >= known_s * (1 - 2 * share)
            elif result is not None:
                assert costs_s[mesh] >= known_s * (1 - 2 * share)
            assert result is None or result.lower_bound_s * (1 - 2e-9) <= costs_s[mesh]
    assert any(bound is not None for _, bound in bounds)


@pytest.mark.parametrize("first", range(6100, 6140, TOGETHER))
def test_meshes_of_any_size_that_are_beaten_together_hold_no_cheaper_plan(first, monkeypatch):
    monkeypatch.setattr(searcher_module, "_MANY_SIZES", 2)
    monkeypatch.setattr(searcher_module, "_NOTHING_TO_GAIN", 3.0)
    bound_of, bounds = MeshSearch.bound_in_any_size, []

    def bound_in_any_size(self, setup, meshes, known_s):
        bounds.append((meshes, bound_of(self, setup, meshes, known_s)))
        return bounds[-1][1]

    monkeypatch.setattr(MeshSearch, "bound_in_any_size", bound_in_any_size)
    for seed in range(first, first + TOGETHER):
        made, machine = random_step(seed), random_machine(seed)
        tried = len(bounds)
        found = plan_dynamic(_step(made), _request(16), machine, DynamicOptions(max_axes=2, small_program=0))
        costs_s = {mesh: _search(made, mesh, machine).cost_s for mesh in candidate_meshes(16, machine, 2)}
        truth = min(costs_s.values())
        assert truth * (1 - 1e-9) <= found.cost_s <= truth * (1 + 2e-3)
        assert found.lower_bound_s <= truth * (1 + 1e-9)
        for meshes, bound in bounds[tried:]:
            assert len(set(map(sizes_of, meshes))) > 1
            assert bound is None or all(bound <= costs_s[mesh] * (1 + 1e-9) for mesh in meshes)
    assert any(bound is not None for _, bound in bounds)
