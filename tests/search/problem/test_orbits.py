"""States that differ by the names of equal axes, taken together: the bound that they give holds, and is mostly tight."""

import numpy as np
import pytest

from spmdctx.cost.step import Step
from spmdctx.ir.domain import domain
from spmdctx.ir.mesh import AnyOrder, LogicalMesh
from spmdctx.search.dynamic import mesh_search
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import Searcher, plan_dynamic
from spmdctx.search.problem import orbits
from spmdctx.search.setup.meshes import MAX_AXES
from spmdctx.search.setup.request import Request, Setup
from spmdctx.search.solver.solve import solve
from tests.search.random_graphs import random_machine, random_step


def _step(made):
    return Step(made.graph, made.scopes, made.from_literals, frozenset())


def _tables(seed, shape, pins=None, num_ops=5):
    made, machine = random_step(seed, num_ops), random_machine(seed)
    step = _step(made)
    setup = Setup(LogicalMesh.of(shape), partial_pins=pins(made.graph) if pins else {})
    return Searcher(step, machine, DynamicOptions())._meshes.formulation.tables(setup)


def _first_dim_over_the_first_axis(graph):
    """Pins under which the axes of a mesh of sizes 2, 2, 2 are not alike any more."""
    pinned = [value for value in graph.inputs if graph.values[value].shape and graph.values[value].shape[0] % 2 == 0]
    return {value: (("data",), *[None] * (len(graph.values[value].shape) - 1)) for value in pinned[:2]}


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 2, 4), (3, 3, 3)])
def test_no_choice_costs_less_than_the_merged_problem(shape, monkeypatch):
    monkeypatch.setattr(orbits, "_FEW_STATES", 0)
    tight = 0
    for seed in range(7100, 7112):
        tables = _tables(seed, shape)
        problem, smaller = tables.problem(), orbits.merged(tables).problem
        whole, bound = solve(problem, effort=4), solve(smaller, effort=4)
        assert sum(map(len, smaller.costs)) <= sum(map(len, problem.costs))
        assert bound.cost <= whole.cost * (1 + 1e-9), seed
        tight += bound.cost >= whole.cost * (1 - 1e-9)
    assert tight >= 8


@pytest.mark.parametrize("at_once", [False, True])
def test_states_on_another_order_of_the_axes_are_those_that_split_alike(at_once):
    orders, exchanged = [LogicalMesh.of((2, 4)), LogicalMesh.of((4, 2))], {"data": "model", "model": "data"}
    for seed in range(7160, 7170):
        made, machine = random_step(seed, 5), random_machine(seed)
        formulation = Searcher(_step(made), machine, DynamicOptions())._meshes.formulation
        own = formulation.tables(Setup(orders[1]))
        other = formulation.tables(Setup(AnyOrder.of_meshes(orders) if at_once else orders[0]))
        for node, states in enumerate(orbits.resembling(own, other)):
            first, second = own.choices[node], other.choices[node]
            assert sorted(states.tolist()) == list(range(len(second.seconds)))
            shapes = orbits._shapes(own, own.network.nodes[node])
            for shape, mine, theirs in zip(shapes, first.stored, second.stored, strict=True):
                here = [domain(orders[1], shape).shardings[number] for number in mine.tolist()]
                there = [domain(other.space.mesh, shape).shardings[number] for number in theirs[states].tolist()]
                assert there == [tuple(tuple(exchanged[name] for name in dim) for dim in dims) for dims in here]


def test_axes_of_different_sizes_are_not_exchanged(monkeypatch):
    monkeypatch.setattr(orbits, "_FEW_STATES", 0)
    assert orbits.merged(_tables(7100, (2, 4, 8))) is None


@pytest.mark.parametrize("pins", [None, _first_dim_over_the_first_axis])
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 4, 2)])
def test_merged_pairs_cost_the_least_of_all_of_their_pairs(shape, pins, monkeypatch):
    monkeypatch.setattr(orbits, "_FEW_STATES", 0)
    for seed in range(7140, 7146):
        tables = _tables(seed, shape, pins)
        whole, smaller = tables.problem(), orbits.merged(tables)
        merged = smaller.problem
        classes = [[] for _ in merged.costs]
        for number in range(max(map(len, merged.costs))):
            behind = smaller.behind([min(number, len(costs) - 1) for costs in merged.costs])
            for own, costs, states in zip(classes, merged.costs, behind, strict=True):
                own += [states] * (number < len(costs))
        for own, costs, every in zip(classes, merged.costs, whole.costs, strict=True):
            assert sorted(np.concatenate(own)) == list(range(len(every)))
            assert costs.tolist() == [every[states].min() for states in own]
        for edge, other in zip(merged.edges, whole.edges, strict=True):
            assert (edge.left, edge.right) == (other.left, other.right)
            least = [[other.table[np.ix_(one, two)].min() for two in classes[edge.right]] for one in classes[edge.left]]
            np.testing.assert_allclose(edge.table, least, rtol=1e-12, atol=1e-30)


def test_plans_found_among_merged_states_are_as_cheap_as_all_others(monkeypatch):
    monkeypatch.setattr(orbits, "_FEW_STATES", 0)
    request = Request("auto_parallel", 8, None, None, (), frozenset(), (), (), frozenset())
    ruled_out = 0
    for seed in range(7120, 7128):
        made, machine = random_step(seed, 6), random_machine(seed)
        step = Step(made.graph, made.scopes, made.from_literals, frozenset())
        found = plan_dynamic(step, request, machine, DynamicOptions())
        with monkeypatch.context() as patch:
            patch.setattr(mesh_search, "merged", lambda *_: None)
            before = plan_dynamic(step, request, machine, DynamicOptions())
        assert found.assignment == before.assignment, seed
        assert found.cost_s == before.cost_s
        assert found.lower_bound_s == pytest.approx(before.lower_bound_s, rel=1e-8)
        ruled_out += len(found.setup.mesh.axes) < MAX_AXES
    assert ruled_out


def test_a_search_begins_with_the_states_of_a_plan_for_nodes_that_are_alike():
    kept = 0
    for seed in range(7200, 7210):
        tables, others = _tables(seed, (2, 2)), _tables(seed + 50, (2, 2))
        problem, precedents = tables.problem(), orbits.Precedents()
        assert precedents.starts(tables, problem) == ((), 0.0)
        best = solve(problem, effort=4)
        least = tuple([int(own.argmin()) for own in problem.costs])
        precedents.keep(tables, (best.states, least), 0.1)
        assert precedents.starts(tables, problem) == ((best.states, least), 0.1)
        assert precedents.starts(_tables(seed, (4,)), problem) == ((), 0.0)
        # Nodes that the plan does not have take what costs least beside the others.
        (states, _), gap = precedents.starts(others, others.problem())
        assert gap == 0.1
        assert all(0 <= state < len(own.seconds) for state, own in zip(states, others.choices, strict=True))
        mine, theirs = set(orbits._kinds_of(tables)), set(orbits._kinds_of(others))
        kept += bool(mine & theirs) and bool(theirs - mine)
    assert kept


def test_a_smaller_program_or_more_room_than_one_without_a_plan_is_searched():
    tables, precedents = _tables(7200, (2, 2)), orbits.Precedents()
    assert not precedents.is_short(tables, 0)
    precedents.keep_short(tables, 100)
    assert precedents.is_short(tables, 100)
    assert not precedents.is_short(tables, 101)
    assert not precedents.is_short(_tables(7200, (4,)), 100)
    assert not precedents.is_short(_tables(7200, (2, 2), num_ops=3), 100)
