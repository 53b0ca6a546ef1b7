from dataclasses import replace

import numpy as np
import pytest

from spmdctx.search.solver.limited.constrained import Constrained
from spmdctx.search.solver.problem.memory import Rows
from spmdctx.search.solver.problem.problem import Edge, Infeasible, Known, Life, Memory, Problem, Solution
from spmdctx.search.solver.solve import solve
from tests.search.solver.problems import cost_of, random_problem, truth, usage_of


def layers(num_layers, limit, seed=0, num_states=4):
    """A chain of layers like a training step: cheap states use much, kept from the forward to the backward pass."""
    random = np.random.default_rng(seed)
    costs, usages, edges, lives = [], [], [], []
    end = 4 * num_layers
    table = random.integers(0, 20, (num_states, num_states)).astype(float)
    np.fill_diagonal(table, 0.0)
    cost = np.arange(num_states) * 10.0
    used = 100.0 / 2.0 ** np.arange(num_states)
    for layer in range(num_layers):
        for part in range(3):
            node = len(costs)
            costs.append(cost + random.integers(0, 5, num_states))
            usages.append(used)
            lives.append(Life(node, layer, layer + 2) if part == 2 else Life(node, layer, end - layer))
            if node:
                edges.append(Edge(node - 1, node, table))
            if part == 2:
                edges.append(Edge(node - 2, node, table))
    return Problem(tuple(costs), tuple(edges), Memory(tuple(usages), tuple(lives), limit))


@pytest.fixture
def without_enumeration(monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    monkeypatch.setattr("spmdctx.search.solver.limited.frontier.MAX_ROWS", 0)


@pytest.fixture
def wide(monkeypatch, without_enumeration):
    monkeypatch.setattr("spmdctx.search.solver.limited.constrained.is_narrow", lambda graph: False)


def check(problem):
    found, true = solve(problem), truth(problem)
    if isinstance(found, Infeasible):
        assert np.isinf(true.cost)
        assert found.smallest_limit == pytest.approx(true.limit, rel=1e-5)
        if np.isfinite(found.smallest_limit) and found.time >= 0:
            relaxed = Memory(problem.memory.usages, problem.memory.lives, found.smallest_limit)
            assert isinstance(solve(Problem(problem.costs, problem.edges, relaxed)), Solution)
        return
    assert found.cost == pytest.approx(true.cost)
    assert found.lower_bound <= true.cost + 1e-9
    assert found.lower_bound == pytest.approx(true.cost)
    assert max(usage_of(problem, found.states)) <= problem.memory.limit * (1 + 1e-12)


@pytest.mark.parametrize("block", range(4))
def test_prices_and_programs_agree_with_trying_everything(block, without_enumeration):
    for seed in range(25 * block, 25 * block + 25):
        check(random_problem(seed))


@pytest.mark.parametrize("block", range(4))
def test_frontiers_agree_with_trying_everything(block, monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    monkeypatch.setattr("spmdctx.search.solver.limited.program.integer_optimum", None)
    for seed in range(25 * block, 25 * block + 25):
        check(random_problem(seed))


@pytest.mark.parametrize("block", range(4))
def test_the_road_for_wide_problems_agrees_with_trying_everything(block, wide):
    for seed in range(100 + 25 * block, 125 + 25 * block):
        check(random_problem(seed))


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("fixtures", ["without_enumeration", "wide"])
def test_within_memory_a_solution_is_best_or_all_is_proven_to_be_above_the_cutoff(factor, fixtures, request):
    request.getfixturevalue(fixtures)
    for seed in range(200, 230):
        problem = random_problem(seed)
        true = truth(problem)
        found = solve(problem, cutoff=factor * true.cost)
        if isinstance(found, Infeasible):
            continue
        assert found.lower_bound <= true.cost * (1 + 1e-9), seed
        assert found.lower_bound >= factor * true.cost or found.cost == pytest.approx(true.cost), seed


@pytest.mark.parametrize("seed", range(3))
def test_no_gap_is_closed_once_all_is_above_the_cutoff(seed, wide, monkeypatch):
    problem = layers(12, 1500.0, seed)
    best, closed, close = solve(problem), [], Constrained._close
    monkeypatch.setattr(Constrained, "_close", lambda self: closed.append(self) or close(self))
    found = solve(problem, cutoff=0.8 * best.cost)
    assert 0.8 * best.cost <= found.lower_bound <= best.cost <= found.cost
    assert not closed


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("num_layers", [4, 12])
def test_layers_are_proven_optimal_within_memory(num_layers, share):
    free = layers(num_layers, np.inf)
    most = max(usage_of(free, [0] * len(free.costs)))
    problem = layers(num_layers, share * most)
    found = solve(problem)
    assert max(usage_of(problem, found.states)) <= problem.memory.limit
    assert found.cost == pytest.approx(cost_of(problem, found.states))
    assert found.lower_bound == found.cost


def test_a_limit_below_the_least_usage_names_the_time_and_the_limit_that_works():
    problem = layers(4, 10.0)
    least = usage_of(problem, [3] * len(problem.costs))
    assert solve(problem) == Infeasible(least.index(max(least)), max(least), max(least))
    assert isinstance(solve(layers(4, max(least))), Solution)


@pytest.mark.parametrize("seed", range(3))
def test_a_wide_problem_starts_from_a_known_choice_without_discarded_states(seed, wide, monkeypatch):
    started, repaired = [], Constrained._offer_repaired

    def recorded(self, states):
        started.append((self, list(states)))
        repaired(self, states)

    problem, again = layers(8, 1500.0, seed), [0, 1, 2, 3, 0]
    # A state that costs and uses as much as another one, and then some, is discarded.
    costs = tuple(np.append(cost, cost[0] + 1.0) for cost in problem.costs)
    edges = tuple(Edge(edge.left, edge.right, edge.table[np.ix_(again, again)]) for edge in problem.edges)
    memory = replace(problem.memory, usages=tuple(np.append(usage, usage[0]) for usage in problem.memory.usages))
    wider = Problem(costs, edges, memory)
    best = solve(problem)
    monkeypatch.setattr(Constrained, "_offer_repaired", recorded)
    found = solve(wider, effort=1, known=Known((tuple(4 if state == 0 else state for state in best.states),), best.lower_bound))
    assert 0 in best.states
    first, states = started[0]
    assert tuple(first.graph.complete(states)) == best.states
    assert found.cost == pytest.approx(best.cost)
    assert found.lower_bound == pytest.approx(best.cost)


@pytest.mark.parametrize("seed", range(3))
def test_a_wide_problem_is_no_dearer_than_any_choice_that_is_known_and_fits(seed, wide, monkeypatch):
    offered, repaired = [], Constrained._offer_repaired

    def recorded(self, states):
        offered.append(tuple(self.graph.complete(states)))
        repaired(self, states)

    problem = layers(8, 1500.0, seed)
    best, over = solve(problem, effort=1), (0,) * len(problem.costs)
    monkeypatch.setattr(Constrained, "_offer_repaired", recorded)
    found = solve(problem, effort=0, known=Known((over, best.states), -np.inf))
    assert offered[:2] == [over, best.states]
    assert found.cost <= best.cost


@pytest.mark.parametrize("seed", range(3))
def test_a_wide_problem_is_searched_no_further_where_a_known_choice_is_near_enough(seed, wide):
    problem = layers(8, 1500.0, seed)
    best = solve(problem, effort=1)
    far, near = (solve(problem, effort=1, known=Known((best.states,), 0.9 * best.cost, (), gap)) for gap in (0.05, 0.11))
    # Costs are whole numbers here, so bounds are rounded up.
    assert near.lower_bound == np.ceil(0.9 * best.cost)
    assert near.cost <= best.cost
    assert far.lower_bound > near.lower_bound


def test_only_maximal_sets_of_live_nodes_become_rows():
    lives = (Life(0, 0, 10), Life(1, 2, 5), Life(2, 3, 4), Life(3, 6, 8), Life(3, 7, 9), Life(4, 1, 1))
    rows = Rows(Memory((np.ones(1),) * 5, lives, 0.5), [np.zeros(1, int)] * 5)
    assert rows.times.tolist() == [3, 7]
    assert rows.usage(np.ones(5)).tolist() == [3.0, 3.0]
    assert rows.weights(np.array([1.0, 10.0])).tolist() == [11.0, 1.0, 1.0, 20.0, 0.0]


def test_a_node_counts_as_often_as_the_shares_of_its_lives_say():
    lives = (Life(0, 0, 9), Life(0, 2, 6, 1.1), Life(0, 2, 4, 1.1), Life(1, 0, 1), Life(1, 5, 9, 0.5), Life(1, 7, 9))
    rows = Rows(Memory((np.ones(1),) * 2, lives, 0.5), [np.zeros(1, int)] * 2)
    assert dict(zip(rows.times.tolist(), rows.usage(np.array([1.0, 10.0])).round(9).tolist(), strict=True)) == {
        0: 11.0,
        2: 3.2,
        5: 7.1,
        7: 16.0,
    }
    # Nothing is left of shares that end.
    assert [pieces[-1][2] for pieces in rows.ranges] == [1.0, 1.5]


def test_prices_go_from_the_rows_of_one_problem_to_those_of_another_by_their_times():
    usages, possible = (np.ones(1),) * 3, [np.zeros(1, int)] * 3
    one = Rows(Memory(usages, (Life(0, 0, 4), Life(1, 2, 6), Life(2, 5, 9)), 0.5), possible)
    other = Rows(Memory(usages, (Life(0, 0, 4), Life(1, 3, 9)), 0.5), possible)
    assert one.times.tolist() == [2, 5]
    assert one.at_times(np.array([0.0, 7.0])) == ((5, 7.0),)
    assert one.of_times(one.at_times(np.array([3.0, 7.0]))).tolist() == [3.0, 7.0]
    assert other.of_times(((1, 2.0), (5, 7.0), (8, 1.0))).tolist() == [10.0]


def test_memory_that_cannot_bind_has_no_rows():
    rows = Rows(Memory((np.ones(2),) * 2, (Life(0, 0, 2), Life(1, 0, 2)), 2.0), [np.arange(2)] * 2)
    assert len(rows.times) == 0


def test_a_deadline_still_gives_a_choice_that_fits():
    problem = layers(12, 1000.0)
    found = solve(problem, deadline=lambda: True)
    assert isinstance(found, Solution)
    assert max(usage_of(problem, found.states)) <= 1000.0
    assert found.lower_bound <= found.cost


@pytest.mark.parametrize("fixtures", ["without_enumeration", "wide"])
def test_a_limit_of_nothing_leaves_only_what_uses_nothing(fixtures, request):
    request.getfixturevalue(fixtures)
    problem = layers(3, 0.0)
    usages = tuple(np.append(used[:-1], 0.0) for used in problem.memory.usages)
    found = solve(Problem(problem.costs, problem.edges, Memory(usages, problem.memory.lives, 0.0)))
    assert found.states == (3,) * len(problem.costs)
    assert found.lower_bound == found.cost


def twice(problem):
    """Two copies that share twice the memory: each node of the problem stands for two things, which may take different states."""
    count, memory = len(problem.costs), problem.memory
    edges = [Edge(left + shift, right + shift, table) for shift in (0, count) for left, right, table in problem.edges]
    lives = [life._replace(node=life.node + shift) for shift in (0, count) for life in memory.lives]
    return Problem(problem.costs * 2, tuple(edges), Memory(memory.usages * 2, tuple(lives), 2 * memory.limit))


@pytest.mark.parametrize("fixture", ["without_enumeration", "wide"])
def test_a_relaxed_bound_holds_where_a_node_stands_for_two_things(fixture, request):
    request.getfixturevalue(fixture)
    reached, coarse = 0, 0
    for seed in range(30):
        whole = layers(3, np.inf, seed)
        problem = layers(3, 0.7 * max(usage_of(whole, solve(whole).states)), seed)
        found, apart = solve(problem), solve(twice(problem), effort=4)
        if isinstance(found, Infeasible):
            continue
        assert found.relaxed <= found.lower_bound <= found.cost + 1e-9
        assert found.relaxed <= apart.cost / 2 + 1e-9
        reached += np.isfinite(found.relaxed)
        coarse += apart.cost / 2 < found.lower_bound - 1e-9
    assert reached >= 15
    assert coarse >= 5


def test_where_memory_cannot_bind_no_bound_is_relaxed():
    assert solve(layers(3, np.inf)).relaxed is None
