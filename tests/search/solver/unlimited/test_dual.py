import numpy as np
import pytest

from spmdctx.search.solver.problem.graph import CostGraph, cost_of
from spmdctx.search.solver.problem.pool import Pool
from spmdctx.search.solver.problem.problem import Edge, Problem
from spmdctx.search.solver.unlimited import batches
from spmdctx.search.solver.unlimited import dual as dual_module
from spmdctx.search.solver.unlimited.dominance import discard, supported, thin
from spmdctx.search.solver.unlimited.dual import Dual
from spmdctx.search.solver.unlimited.energy import minimise
from spmdctx.search.solver.unlimited.run import SolverRun
from tests.search.solver.problems import assert_beliefs_below_the_truth, random_problem, truth


def grid(side, num_states, seed):
    """A grid with random tables, too wide for small tables."""
    random = np.random.default_rng(seed)
    nodes = [(row, column) for row in range(side) for column in range(side)]
    costs = tuple(random.integers(0, 30, num_states).astype(float) for _ in nodes)
    edges = []
    for row, column in nodes:
        for other in ((row + 1, column), (row, column + 1)):
            if max(other) < side:
                table = random.integers(0, 30, (num_states, num_states)).astype(float)
                edges.append(Edge(row * side + column, other[0] * side + other[1], table))
    return Problem(costs, tuple(edges))


@pytest.mark.parametrize(("by_colour", "num_sweeps"), [(False, 2), (True, 2), (False, 30)])
@pytest.mark.parametrize("seed", range(40))
def test_bounds_and_beliefs_never_exceed_the_truth(seed, by_colour, num_sweeps, monkeypatch):
    monkeypatch.setattr(dual_module, "MAX_NUMBERED", 0 if by_colour else 1000)
    problem = random_problem(seed, with_memory=False)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    true = truth(problem)
    if not supported(graph) or np.isinf(true.cost):
        return
    dual = Dual(graph)
    dual.gain_momentum()
    last = -np.inf
    for _ in range(3):
        dual.sweep(num_sweeps, lambda: False)
        bound = dual.bound()
        assert last - 1e-6 <= bound.value <= true.cost + 1e-9
        last = bound.value
        assert_beliefs_below_the_truth(graph, bound)


def test_a_tree_has_no_gap():
    random = np.random.default_rng(0)
    edges = tuple(Edge(int(random.integers(node)), node, random.random((3, 3))) for node in range(1, 20))
    graph = CostGraph.of(tuple(random.random(3) for _ in range(20)), edges, Pool())
    dual = Dual(graph)
    dual.sweep(30, lambda: False)
    states = dual.decode()
    assert dual.bound().value == pytest.approx(cost_of([graph.costs(node) for node in range(20)], edges, states), abs=1e-9)


def bound_after(problem, num_sweeps, *, has_momentum=False):
    dual = Dual(CostGraph.of(problem.costs, problem.edges, Pool()))
    if has_momentum:
        dual.gain_momentum()
    dual.sweep(num_sweeps, lambda: False)
    return dual.bound().value


def long_ring():
    """A ring whose messages change slowly, and always in one direction."""
    random = np.random.default_rng(3)
    costs = tuple(random.random(4) for _ in range(30))
    return Problem(costs, tuple(Edge(node, (node + step) % 30, random.random((4, 4))) for node in range(30) for step in (1, 7)))


def test_momentum_saves_sweeps_on_long_rings():
    assert bound_after(long_ring(), 30, has_momentum=True) > bound_after(long_ring(), 60)


def test_messages_return_to_the_highest_bound_where_momentum_is_too_much(monkeypatch):
    monkeypatch.setattr(dual_module, "MOMENTUM", 3.0)
    monkeypatch.setattr(dual_module, "DELAY", 0)
    monkeypatch.setattr(dual_module, "CALM", 0)
    dual = Dual(CostGraph.of((problem := long_ring()).costs, problem.edges, Pool()))
    dual.gain_momentum()
    bounds = []
    for _ in range(20):
        dual.sweep(5, lambda: False)
        bounds.append(dual.bound().value)
    assert bounds == sorted(bounds)
    assert bounds[-1] > bound_after(problem, 5)


def test_edges_of_one_large_table_get_the_same_messages_at_once_and_one_by_one(monkeypatch):
    random = np.random.default_rng(1)
    table = random.random((70, 70))
    edges = [Edge(one, 3 + two, table) for one in range(3) for two in range(3)]
    problem = Problem(tuple(random.random(70) for _ in range(6)), tuple(edges[:7]))
    at_once = bound_after(problem, 4)
    monkeypatch.setattr(dual_module, "MUCH_WORK", 0.0)
    assert bound_after(problem, 4) == pytest.approx(at_once, abs=1e-12)


def test_messages_do_not_depend_on_how_tables_lie_in_memory(monkeypatch):
    random = np.random.default_rng(2)
    edges = [Edge(one, 3 + two, random.random((40, 50))) for one in range(3) for two in range(3)]
    problem = Problem(tuple(random.random(40 if node < 3 else 50) for node in range(6)), tuple(edges))
    found = []
    for turned in (0.0, np.inf):
        monkeypatch.setattr(batches, "TURNED", turned)
        dual = Dual(CostGraph.of(problem.costs, problem.edges, Pool()))
        dual.sweep(4, lambda: False)
        tables = [batch.tables for batch in dual._forward if not isinstance(batch, batches.Single)]
        found.append((dual.bound().value, {own.flags.c_contiguous for own in tables if own.shape[2] > 1}))
    assert found == [(found[0][0], {False}), (found[0][0], {True})]


@pytest.mark.parametrize("remove", [discard, thin])
@pytest.mark.parametrize("seed", range(30))
def test_dominated_states_do_not_change_the_optimum(seed, remove, monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.unlimited.dominance.WIDE", 2)
    problem = random_problem(seed, with_memory=False)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    true = truth(problem)
    if supported(graph):
        before = sum(graph.size(node) for node in graph.nodes())
        assert remove(graph) == before - sum(graph.size(node) for node in graph.nodes())
        found = minimise(graph, SolverRun())
        assert (np.inf if found is None else found.cost) == pytest.approx(true.cost)
    else:
        assert np.isinf(true.cost)


def leave_no_elimination(monkeypatch, work):
    """Lets elimination take hardly any work, so that bounds and states come of messages."""
    for name in ("DIRECT_WORK", "SHELL_WORK"):
        monkeypatch.setattr(f"spmdctx.search.solver.unlimited.energy.{name}", work)


@pytest.mark.parametrize("seed", range(3))
def test_shells_prove_what_elimination_finds(seed, monkeypatch):
    problem = grid(5, 6, seed)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    exact = minimise(graph, SolverRun())
    monkeypatch.setattr("spmdctx.search.solver.unlimited.energy.DIRECT_WORK", 100)
    search = SolverRun()
    found = minimise(graph, search)
    assert search.counts["sweeps"] > 0
    assert found.cost == found.bound == pytest.approx(exact.cost)
    assert cost_of(problem.costs, problem.edges, found.states) == pytest.approx(exact.cost)


def test_the_bound_is_honest_when_work_is_short(monkeypatch):
    problem = grid(6, 6, 7)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    exact = minimise(graph, SolverRun())
    leave_no_elimination(monkeypatch, 100)
    found = minimise(graph, SolverRun(work=100, rounds=1))
    assert found.bound <= exact.cost <= found.cost


def test_a_cutoff_is_noticed_between_many_sweeps(monkeypatch):
    problem = grid(6, 8, 0)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    sweeps = {}
    for work in (np.inf, 0.0):
        monkeypatch.setattr(dual_module, "MUCH_WORK", work)
        search = SolverRun(cutoff=0.5 * minimise(graph, SolverRun()).cost)
        monkeypatch.setattr("spmdctx.search.solver.unlimited.energy.DIRECT_WORK", 100)
        assert minimise(graph, search).bound >= search.cutoff
        sweeps[work] = search.counts["sweeps"]
    assert sweeps[0.0] < sweeps[np.inf]


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_that_shows_a_minimum_to_be_useless_ends_the_sweeps(seed, monkeypatch):
    problem = grid(6, 8, seed)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    exact = minimise(graph, SolverRun())
    leave_no_elimination(monkeypatch, 100)
    useful, useless = (SolverRun(tolerance=1e-6, useless=most) for most in (0.99 * exact.cost, 1.5 * exact.cost))
    whole, found = minimise(graph, useful), minimise(graph, useless)
    assert useless.counts["sweeps"] < useful.counts["sweeps"]
    assert found.bound <= exact.cost <= found.cost <= 1.5 * exact.cost
    assert whole.cost - whole.bound <= found.cost - found.bound


def test_sweeps_end_where_the_bound_hardly_rises_if_states_are_kept(monkeypatch):
    problem = grid(7, 8, 5)
    graph = CostGraph.of(problem.costs, problem.edges, Pool())
    exact = minimise(graph, SolverRun())
    leave_no_elimination(monkeypatch, 100)
    monkeypatch.setattr("spmdctx.search.solver.unlimited.energy.GOOD_GAP", 4.0)
    monkeypatch.setattr("spmdctx.search.solver.unlimited.energy.WORTH_SWEEPS", 0.2)
    sweeps = {}
    for keeps in (False, True):
        search = SolverRun(tolerance=1e-9, effort=1, keeps_states=keeps)
        found = minimise(graph, search)
        assert found.bound <= exact.cost <= found.cost
        sweeps[keeps] = search.counts["sweeps"]
    assert sweeps[True] < sweeps[False]


@pytest.mark.parametrize("seed", range(4))
def test_a_state_that_has_no_finite_choice_once_a_node_is_peeled_leaves_bounds_true(seed, monkeypatch):
    leave_no_elimination(monkeypatch, 0)
    random = np.random.default_rng(seed)
    tables = {(one, two): random.random((4, 4)) for one in range(6) for two in range(one)}
    # State 0 of node 1 needs state 0 of the small node 6, that needs state 0 of node 0, and this one forbids the first.
    tables[1, 0][0, 0] = np.inf
    small = np.array([[1.0, np.inf], [np.inf, 1.0], [np.inf, 1.0], [np.inf, 1.0]])
    edges = [Edge(one, two, table) for (one, two), table in tables.items()] + [Edge(0, 6, small), Edge(1, 6, small)]
    costs = [random.random(4) for _ in range(6)]
    costs[1][0] = -5.0
    problem = Problem((*costs, np.zeros(2)), tuple(edges))
    found = minimise(CostGraph.of(problem.costs, problem.edges, Pool()), SolverRun(effort=1, work=0))
    true = truth(problem)
    assert found.bound <= true.cost + 1e-9
    assert found.cost == pytest.approx(cost_of(problem.costs, problem.edges, found.states))
    assert found.cost <= true.cost * 1.5
