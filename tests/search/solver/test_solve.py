from dataclasses import replace

import numpy as np
import pytest

from spmdctx.search.solver.problem.allowance import Allowance
from spmdctx.search.solver.problem.problem import Edge, Infeasible, Life, Memory, Problem, Solution
from spmdctx.search.solver.solve import Sought, solve
from spmdctx.search.solver.unlimited.energy import MORE_SWEEPS, SWEEPS
from tests.search.solver.problems import cost_of, random_problem, truth, usage_of
from tests.search.solver.unlimited.test_dual import grid


def check(problem):
    """The answer against the truth."""
    found, true = solve(problem), truth(problem)
    if isinstance(found, Solution):
        assert found.cost == pytest.approx(true.cost, rel=1e-9)
        assert found.cost == pytest.approx(cost_of(problem, found.states), rel=1e-12)
        assert found.lower_bound == found.cost
        assert problem.memory is None or max(usage_of(problem, found.states)) <= problem.memory.limit * (1 + 1e-12)
        return
    assert np.isinf(true.cost)
    if np.isinf(true.limit):
        assert found == Infeasible(-1, 0.0, np.inf)
        return
    assert found.smallest_limit == pytest.approx(true.limit)
    assert found.least_usage > problem.memory.limit
    if max(true.least) > problem.memory.limit:
        assert found.least_usage == pytest.approx(max(true.least))
        assert true.least[found.time] == pytest.approx(found.least_usage)


@pytest.mark.parametrize("block", range(10))
def test_small_problems_have_the_cost_of_trying_everything(block):
    for seed in range(30 * block, 30 * block + 30):
        check(random_problem(seed, with_memory=False, shared_tables=seed % 2 == 0))


@pytest.mark.parametrize("block", range(15))
def test_small_problems_with_memory_have_the_cost_of_trying_everything(block):
    for seed in range(30 * block, 30 * block + 30):
        check(random_problem(seed, shared_tables=seed % 2 == 0))


def test_ties_go_to_the_lowest_state():
    flat = Problem((np.zeros(3), np.zeros(4)), (Edge(0, 1, np.zeros((3, 4))),))
    assert solve(flat) == Solution((0, 0), 0.0, 0.0, solve(flat).counts)


def test_a_problem_of_no_nodes_costs_nothing():
    assert solve(Problem((), ())).cost == 0.0


def planted(seed):
    """Eight nodes, all pairs of them with mostly forbidden pairs of states; one choice of states is allowed for sure."""
    random = np.random.default_rng(seed)
    choice = random.integers(5, size=8)
    edges = []
    for left in range(8):
        for right in range(left):
            table = np.where(random.random((5, 5)) < 0.45, np.inf, random.random((5, 5)))
            table[choice[left], choice[right]] = random.random()
            edges.append(Edge(left, right, table))
    return Problem(tuple(random.random(5) for _ in range(8)), tuple(edges))


def test_a_search_that_is_cut_short_still_has_states_and_a_bound(monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.unlimited.energy.DIRECT_WORK", 0)
    for seed in range(20):
        best, cut = (solve(planted(seed), cutoff=cutoff) for cutoff in (np.inf, -np.inf))
        assert isinstance(cut, Solution), seed
        assert np.isfinite(cut.cost)
        assert cut.lower_bound <= best.cost * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_a_search_that_goes_on_ends_as_one_that_was_never_left(seed, monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.unlimited.energy.DIRECT_WORK", 0)
    problem = planted(seed) if seed % 2 else grid(5, 6, seed)
    sought = Sought(problem)
    left = sought.solve(-np.inf)
    at_once, resumed = solve(problem), sought.solve()
    assert left.counts.get("sweeps", 0) <= at_once.counts.get("sweeps", 0)
    assert resumed == at_once


def crowded(seed):
    """A wide grid whose nodes all take memory at once: the cheapest states take the most."""
    problem = grid(6, 6, seed)
    usages = tuple([costs.max() - costs for costs in problem.costs])
    lives = tuple([Life(node, 0, 1, 1.0) for node in range(len(usages))])
    return replace(problem, memory=Memory(usages, lives, 0.5 * sum(float(own.max()) for own in usages)))


@pytest.mark.parametrize("seed", range(4))
def test_an_allowance_that_is_extended_is_worth_as_much_as_a_larger_one(seed):
    problem = crowded(seed)
    free = Allowance()
    whole = solve(problem, allowance=free)
    shown = []

    def extend(states):
        shown.append(states)
        short.most = np.inf

    # The first choice that fits is known long before a third of the work is done.
    short = Allowance(free.spent / 3, extend=extend)
    found = solve(problem, allowance=short)
    assert (found.states, found.cost, found.lower_bound) == (whole.states, whole.cost, whole.lower_bound)
    assert short.spent == free.spent
    (states,) = shown
    assert max(usage_of(problem, states)) <= problem.memory.limit * (1 + 1e-12)
    assert cost_of(problem, states) >= whole.cost * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_an_allowance_that_is_not_extended_is_asked_for_once(seed):
    problem, asked = crowded(seed), []
    free = Allowance()
    solve(problem, allowance=free)
    short = Allowance(free.spent / 3, extend=asked.append)
    solve(problem, allowance=short)
    assert len(asked) == 1
    assert short.spent < free.spent


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.4, 0.8])
def test_an_allowance_that_ends_while_states_are_discarded_leads_to_an_answer(share):
    for seed in range(200):
        problem, free = random_problem(seed, max_nodes=8, max_states=5), Allowance()
        whole = solve(problem, allowance=free)
        found = solve(problem, allowance=Allowance(share * free.spent))
        if isinstance(found, Solution):
            assert isinstance(whole, Solution), seed
            assert found.cost == pytest.approx(cost_of(problem, found.states), rel=1e-12), seed
            assert max(usage_of(problem, found.states)) <= problem.memory.limit * (1 + 1e-12), seed
            assert found.lower_bound <= whole.cost * (1 + 1e-12), seed


def with_other_states(problem, seed):
    """A problem with costs that are nearly the same, the states in another order and one left out; the places of its states before."""
    random = np.random.default_rng(seed)
    places = [random.permutation(len(costs))[1:] for costs in problem.costs]
    costs = [costs[own] + 1e-3 * random.random(len(own)) for costs, own in zip(problem.costs, places, strict=True)]
    edges = [Edge(left, right, table[np.ix_(places[left], places[right])]) for left, right, table in problem.edges]
    return Problem(tuple(costs), tuple(edges)), places


@pytest.mark.parametrize("seed", range(6))
def test_a_search_from_messages_of_a_problem_alike_takes_fewer_sweeps(seed, monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.unlimited.energy.DIRECT_WORK", 0)
    first = grid(5, 6, seed)
    second, places = with_other_states(first, seed)
    before = Sought(first, is_reused=True)
    assert before.solve().lower_bound == before.solve().cost
    found, cold = Sought(second, alike=before, places=places).solve(), solve(second)
    assert found.cost == pytest.approx(cold.cost, rel=1e-12)
    assert found.lower_bound == found.cost
    assert found.counts["sweeps"] <= cold.counts["sweeps"]
    unknown = [np.full(len(own), -1) for own in places]
    assert Sought(second, alike=before, places=unknown).solve().cost == pytest.approx(cold.cost, rel=1e-12)


def test_a_search_from_one_that_needed_no_messages_starts_anew():
    problem = random_problem(1, with_memory=False)
    before = Sought(problem, is_reused=True)
    assert Sought(problem, alike=before, places=[np.arange(len(own)) for own in problem.costs]).solve() == before.solve()


def test_a_problem_without_finite_choices_stays_hopeless():
    sought = Sought(Problem((np.full(2, np.inf), np.zeros(2)), (Edge(0, 1, np.eye(2)),)))
    assert isinstance(sought.solve(-np.inf), Infeasible)
    assert isinstance(sought.solve(), Infeasible)


def ladder(length):
    """Two long rows in which neighbours want to be near each other, and rungs that want anything."""
    random = np.random.default_rng(length)
    far = np.abs(np.arange(6)[:, None] - np.arange(6)) * 3.0
    edges = [Edge(node, node + 2, far) for node in range(2 * length - 2)]
    for step in (1, 3, 5):
        edges += [Edge(node, node + step, random.random((6, 6))) for node in range(0, 2 * length - step, 2)]
    return Problem(tuple(random.random(6) for _ in range(2 * length)), tuple(edges))


def test_sweeps_go_on_as_long_as_they_raise_the_bound(monkeypatch):
    for name in ("DIRECT_WORK", "SHELL_WORK", "TRIPLES_WORK"):
        monkeypatch.setattr(f"spmdctx.search.solver.unlimited.energy.{name}", 0)
    monkeypatch.setattr("spmdctx.search.solver.solve.WORK", 0)
    found = {}
    for work in (0.0, 2e8):
        monkeypatch.setattr("spmdctx.search.solver.unlimited.energy.MORE_WORK", work)
        found[work] = solve(ladder(30))
    assert found[0.0].counts["sweeps"] == sum(SWEEPS)
    assert found[2e8].counts["sweeps"] >= sum(SWEEPS) + MORE_SWEEPS
    assert found[0.0].lower_bound < found[2e8].lower_bound <= found[2e8].cost


@pytest.mark.parametrize("how", [{"worth": 0.2}, {"is_reused": True}], ids=str)
def test_a_bound_is_tightened_around_cycles_only_where_that_pays(how, monkeypatch):
    for name in ("DIRECT_WORK", "SHELL_WORK", "FIRST_WORK"):
        monkeypatch.setattr(f"spmdctx.search.solver.unlimited.energy.{name}", 0)
    problem = grid(8, 8, 0)
    tight, left = Sought(problem).solve(), Sought(problem, **how).solve()
    assert tight.counts["passes"] > 0
    assert "passes" not in left.counts
    assert left.lower_bound < tight.lower_bound <= tight.cost <= left.cost


def agreeing(seed, num_nodes=60, num_states=6, solutions=4):
    """A random graph on which several choices of all nodes cost nothing more than the nodes do, and parts of different ones do."""
    random = np.random.default_rng(seed)
    chosen = np.array([random.permutation(num_states)[:solutions] for _ in range(num_nodes)])
    others = [(node, int(other)) for node in range(num_nodes) for other in random.choice(num_nodes, 2, replace=False)]
    pairs = {(min(pair), max(pair)) for pair in others if pair[0] != pair[1]}
    edges = []
    for left, right in sorted(pairs):
        table = random.integers(1, 4, (num_states, num_states)).astype(float)
        table[chosen[left], chosen[right]] = 0.0
        edges.append(Edge(left, right, table))
    return Problem(tuple(np.ones(num_states) for _ in range(num_nodes)), tuple(edges))


@pytest.mark.parametrize("seed", range(6))
def test_ties_are_broken_where_nodes_choose_parts_of_different_choices(seed, monkeypatch):
    for name in ("DIRECT_WORK", "SHELL_WORK", "FIRST_WORK", "TRIPLES_WORK"):
        monkeypatch.setattr(f"spmdctx.search.solver.unlimited.energy.{name}", 0)
    monkeypatch.setattr("spmdctx.search.solver.solve.WORK", 0)
    found = solve(agreeing(seed))
    assert found.cost == found.lower_bound == 60.0
