import numpy as np
import pytest

from spmdctx.search.solver.problem.graph import CostGraph, cost_of, is_whole
from spmdctx.search.solver.problem.pool import Pool
from spmdctx.search.solver.problem.problem import Edge
from spmdctx.search.solver.unlimited.eliminate import eliminate, order
from tests.search.solver.problems import random_problem, truth


def graph_of(problem):
    return CostGraph.of(problem.costs, problem.edges, Pool())


@pytest.mark.parametrize("peels", [False, True])
@pytest.mark.parametrize("block", range(4))
def test_elimination_finds_the_least_cost(block, peels):
    for seed in range(25 * block, 25 * block + 25):
        problem = random_problem(seed, with_memory=False)
        graph = graph_of(problem)
        if peels:
            graph.split()
            graph.peel()
        found = order(graph, 10**7, 10**9)
        states, cost = eliminate(graph, found.nodes, {}, lambda: False)
        assert cost + graph.base == pytest.approx(truth(problem).cost)
        assert cost_of(problem.costs, problem.edges, graph.complete(states)) == pytest.approx(truth(problem).cost)


def test_the_order_gives_up_above_its_limits():
    table = np.zeros((4, 4))
    clique = tuple(Edge(left, right, table) for left in range(6) for right in range(left))
    graph = CostGraph.of((np.zeros(4),) * 6, clique, Pool())
    assert order(graph, 4**5, 10**9).largest == 4**5
    assert order(graph, 4**5 - 1, 10**9) is None
    assert order(graph, 4**5, 1000) is None


def test_elimination_stops_when_the_time_is_over():
    graph = CostGraph.of((np.zeros(2),), (), Pool())
    assert eliminate(graph, (0,), {}, lambda: True) is None


def test_repeated_structure_is_computed_once():
    table, costs = np.array([[0.0, 1.0], [2.0, 0.0]]), np.array([0.0, 1.0])
    chain = tuple(Edge(node, node + 1, table) for node in range(200))
    memo = {}
    graph = CostGraph.of((costs,) * 201, chain, Pool())
    eliminate(graph, tuple(range(201)), memo, lambda: False)
    assert len(memo) < 10


def test_parallel_edges_and_loops_are_merged():
    table = np.array([[1.0, 2.0], [3.0, 4.0]])
    graph = CostGraph.of((np.zeros(2), np.zeros(2)), (Edge(0, 1, table), Edge(1, 0, table), Edge(0, 0, table)), Pool())
    assert graph.table(0, 1).tolist() == (table + table.T).tolist()
    assert graph.costs(0).tolist() == [1.0, 4.0]


def test_a_table_that_is_a_sum_of_row_and_column_costs_is_split():
    table = np.array([[1.0, 3.0], [5.0, 7.0]])
    graph = CostGraph.of((np.zeros(2), np.zeros(2)), (Edge(0, 1, table),), Pool())
    graph.split()
    assert graph.links == [{}, {}]
    assert (graph.costs(0)[:, None] + graph.costs(1)).tolist() == table.tolist()


def test_restricted_states_are_mapped_back():
    graph = CostGraph.of((np.array([3.0, 2.0, 1.0]), np.zeros(2)), (Edge(0, 1, np.arange(6.0).reshape(3, 2)),), Pool())
    graph.restrict({0: np.array([0, 2])})
    assert graph.costs(0).tolist() == [3.0, 1.0]
    assert graph.table(1, 0).tolist() == [[0.0, 4.0], [1.0, 5.0]]
    assert graph.complete([1, 1]) == [2, 1]


@pytest.mark.parametrize(("cost", "whole"), [(2.0, True), (np.inf, True), (2.5, False), (2.0**60, False)])
def test_whole_costs_are_recognised(cost, whole):
    assert is_whole(CostGraph.of((np.array([cost, 1.0]),), (), Pool())) == whole
