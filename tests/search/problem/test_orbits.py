"""States that differ by the names of equal axes, taken together: the bound that they give holds, and is mostly tight."""

import pytest

from spmdctx.cost.step import Step
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.search.dynamic import mesh_search
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import Searcher, plan_dynamic
from spmdctx.search.problem import orbits
from spmdctx.search.setup.meshes import MAX_AXES
from spmdctx.search.setup.request import Request, Setup
from spmdctx.search.solver.solve import solve
from tests.search.random_graphs import random_machine, random_step


def _problem(seed, shape):
    made, machine = random_step(seed, 5), random_machine(seed)
    step = Step(made.graph, made.scopes, made.from_literals, frozenset())
    searcher = Searcher(step, machine, DynamicOptions())
    tables = searcher._meshes.formulation.tables(Setup(LogicalMesh.of(shape)))
    return tables, tables.problem()


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 2, 4), (3, 3, 3)])
def test_no_choice_costs_less_than_the_merged_problem(shape, monkeypatch):
    monkeypatch.setattr(orbits, "_FEW_STATES", 0)
    tight = 0
    for seed in range(7100, 7112):
        tables, problem = _problem(seed, shape)
        smaller = orbits.merged(tables, problem)
        whole, bound = solve(problem, effort=4), solve(smaller, effort=4)
        assert sum(map(len, smaller.costs)) <= sum(map(len, problem.costs))
        assert bound.cost <= whole.cost * (1 + 1e-9), seed
        tight += bound.cost >= whole.cost * (1 - 1e-9)
    assert tight >= 8


def test_axes_of_different_sizes_are_not_exchanged(monkeypatch):
    monkeypatch.setattr(orbits, "_FEW_STATES", 0)
    assert orbits.merged(*_problem(7100, (2, 4, 8))) is None


def test_a_mesh_that_the_bound_rules_out_leaves_the_same_plan(monkeypatch):
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
