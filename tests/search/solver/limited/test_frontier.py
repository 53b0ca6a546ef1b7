import numpy as np
import pytest

from spmdctx.search.solver.limited import frontier
from spmdctx.search.solver.limited.frontier import cheapest_fitting, order_for
from spmdctx.search.solver.limited.selection import Amounts
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.local import cost
from spmdctx.search.solver.problem.memory import Rows
from spmdctx.search.solver.problem.pool import Pool
from spmdctx.search.solver.problem.problem import Edge, Life, Memory, Problem
from tests.search.solver.problems import random_problem, truth, usage_of


def _graph(problem):
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    return graph, Amounts(graph, Rows(problem.memory, graph.origin))


def _best(problem, most=np.inf, price=0.0):
    graph, amounts = _graph(problem)
    prices = np.full(len(amounts.rows.times), price)
    return graph, cheapest_fitting(graph, amounts, prices, most, lambda: False)


def chain(num_nodes, num_states, limit, seed=0):
    """Nodes that all use memory at once, where cheap states use much."""
    random = np.random.default_rng(seed)
    costs = [np.sort(random.random(num_states)) for _ in range(num_nodes)]
    usages = tuple(np.sort(random.random(num_states))[::-1] for _ in range(num_nodes))
    edges = [Edge(node, node + 1, random.random((num_states, num_states)) * 0.1) for node in range(num_nodes - 1)]
    return Problem(tuple(costs), tuple(edges), Memory(usages, tuple(Life(node, 0, 1) for node in range(num_nodes)), limit))


@pytest.mark.parametrize("price", [0.0, 0.3, 50.0])
@pytest.mark.parametrize("block", range(4))
def test_the_choice_is_the_cheapest_that_fits(block, price):
    fitting = 0
    for seed in range(50 * block, 50 * block + 50):
        problem = random_problem(seed)
        true, (graph, best) = truth(problem), _best(problem, price=price)
        if not len(_graph(problem)[1].rows.times):
            continue
        assert (best.states is None) == np.isinf(true.cost), seed
        if best.states is not None:
            fitting += 1
            assert cost(graph, best.states) + graph.base == pytest.approx(true.cost), seed
            assert max(usage_of(problem, best.states)) <= problem.memory.limit * (1 + 1e-12), seed
    assert fitting > 5


def test_only_what_costs_less_than_what_is_known_is_looked_for():
    problem = chain(6, 4, 2.0)
    true = truth(problem).cost
    assert _best(problem, true * (1 + 1e-9))[1].states is not None
    assert _best(problem, true)[1].states is None
    assert _best(problem, true * 0.9)[1].states is None


def test_choices_that_others_beat_are_given_up(monkeypatch):
    monkeypatch.setattr(frontier, "MAX_CHOICES", 20_000)
    # Of 6 ** 12 choices.
    _, best = _best(chain(12, 6, 4.0))
    assert best is not None
    assert best.states is not None


def test_what_is_too_much_work_is_not_begun_or_left(monkeypatch):
    problem = chain(8, 5, 3.0)
    graph, amounts = _graph(problem)
    prices = np.zeros(len(amounts.rows.times))
    assert cheapest_fitting(graph, amounts, prices, np.inf, lambda: True) is None
    with monkeypatch.context() as patch:
        patch.setattr(frontier, "MAX_CHOICES", 1)
        assert cheapest_fitting(graph, amounts, prices, np.inf, lambda: False) is None
    for limit in ("MAX_ROWS", "MAX_TABLE", "MAX_WORK"):
        with monkeypatch.context() as patch:
            patch.setattr(frontier, limit, 0)
            assert order_for(graph, amounts.rows) is None
            assert cheapest_fitting(graph, amounts, prices, np.inf, lambda: False) is None


def test_pieces_of_the_choices_are_put_together_again(monkeypatch):
    problem = chain(8, 5, 3.0)
    _, whole = _best(problem)
    monkeypatch.setattr(frontier, "_AT_ONCE", 1)
    assert _best(problem)[1] == whole
