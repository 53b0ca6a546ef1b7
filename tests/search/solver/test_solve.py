import numpy as np
import pytest

from spmdctx.search.solver.problem import Edge, Infeasible, Problem, Solution
from spmdctx.search.solver.solve import solve
from tests.search.solver.problems import cost_of, random_problem, truth, usage_of


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
    monkeypatch.setattr("spmdctx.search.solver.energy.DIRECT_WORK", 0)
    for seed in range(20):
        best, cut = (solve(planted(seed), cutoff=cutoff) for cutoff in (np.inf, -np.inf))
        assert isinstance(cut, Solution), seed
        assert np.isfinite(cut.cost)
        assert cut.lower_bound <= best.cost * (1 + 1e-12)
