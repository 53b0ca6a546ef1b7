import numpy as np
import pytest

from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.pool import Pool
from spmdctx.search.solver.problem.problem import Edge, Problem
from spmdctx.search.solver.unlimited.dominance import supported
from spmdctx.search.solver.unlimited.dual import Dual
from spmdctx.search.solver.unlimited.energy import minimise
from spmdctx.search.solver.unlimited.run import SolverRun
from spmdctx.search.solver.unlimited.triples import Triples
from tests.search.solver.problems import assert_beliefs_below_the_truth, random_problem, truth
from tests.search.solver.unlimited.test_dual import grid


def started(graph, sweeps=20):
    dual = Dual(graph)
    dual.sweep(sweeps, lambda: False)
    return Triples(graph, dual, 1e4)


def odd_cycle(length):
    """Neighbours want to differ, which one pair cannot: edges alone say 0, the truth is 1."""
    differ = np.eye(2)
    return Problem((np.zeros(2),) * length, tuple(Edge(node, (node + 1) % length, differ) for node in range(length)))


def glass(side, seed):
    """A grid of pairs of states; some neighbours want to agree, some to differ, which goes around no square of odd parity."""
    random = np.random.default_rng(seed)
    problem = grid(side, 2, seed)
    edges = tuple(edge._replace(table=np.eye(2) if random.random() < 0.5 else 1 - np.eye(2)) for edge in problem.edges)
    return Problem(tuple(random.random(2) / 10 for _ in problem.costs), edges)


@pytest.mark.parametrize("seed", range(40))
def test_bounds_and_beliefs_never_exceed_the_truth(seed):
    problem = random_problem(seed, with_memory=False)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    true = truth(problem)
    if not supported(graph) or np.isinf(true.cost):
        return
    triples = started(graph, 2)
    triples.cover({node: graph.size(node) for node in graph.nodes()}, 10**6)
    triples.run(3)
    bound = triples.bound()
    assert bound.value <= true.cost + 1e-9
    assert_beliefs_below_the_truth(graph, bound)


@pytest.mark.parametrize("length", [3, 5, 8, 9])
def test_cycles_that_edges_cannot_see_are_closed(length):
    problem = odd_cycle(length)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    triples = started(graph)
    assert triples.bound().value == pytest.approx(0.0, abs=1e-9)
    triples.cover(dict.fromkeys(range(length), 2), 10**6)
    triples.run(100)
    assert triples.bound().value == pytest.approx(length % 2, abs=1e-3)


def test_no_more_triples_than_allowed():
    problem = odd_cycle(9)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    triples = started(graph)
    before = triples.work
    triples.cover(dict.fromkeys(range(9), 2), 7)
    assert triples.work == before


@pytest.mark.parametrize("seed", range(4))
def test_states_that_cost_too_much_are_left_out_and_the_best_stay(seed):
    problem = grid(4, 5, seed)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    best = minimise(graph, SolverRun())
    triples = started(graph)
    triples.cover(dict.fromkeys(graph.nodes(), 5), 10**6)
    triples.run(10)
    assert triples.restrict(best.cost)
    triples.run(10)
    bound = triples.bound()
    assert bound.value <= best.cost
    assert all(bound.beliefs[node][state] <= best.cost + 1e-9 for node, state in enumerate(best.states))
    assert any(np.isinf(beliefs).any() for beliefs in bound.beliefs.values())
    assert not triples.restrict(bound.value - 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_triples_raise_the_bound_of_what_is_too_wide(seed, monkeypatch):
    for name in ("DIRECT_WORK", "SHELL_WORK"):
        monkeypatch.setattr(f"spmdctx.search.solver.unlimited.energy.{name}", 100)
    problem = glass(7, seed)
    bounds = []
    for work in (0, 10**7):
        monkeypatch.setattr("spmdctx.search.solver.unlimited.energy.TRIPLES_WORK", work)
        graph = CostGraph.of(problem.costs, problem.edges, Pool())
        found = minimise(graph, SolverRun(work=100))
        bounds.append(found.bound)
        assert found.bound <= found.cost
    assert bounds[1] > bounds[0]
