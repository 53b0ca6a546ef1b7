"""The order in which meshes with the same axes are searched."""

from spmdctx.cost.step import Step
from spmdctx.search.dynamic import searcher as searcher_module
from spmdctx.search.dynamic.mesh_search import MeshSearch
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import plan_dynamic
from spmdctx.search.setup.request import Request
from spmdctx.search.solver.problem.graph import cost_of
from tests.search.random_graphs import random_machine, random_step


def test_the_order_on_which_the_joint_choice_costs_less_comes_first(monkeypatch):
    monkeypatch.setattr(searcher_module, "_MANY_SIZES", 2)
    sort, sorted_first, searched = MeshSearch.cheaper_first, [], []
    search = MeshSearch.fastest_on

    def cheaper_first(self, setups):
        result = sort(self, setups)
        costs = {mesh: cost_of(own.problem.costs, own.problem.edges, own.states) for mesh, own in self._choices.items()}
        assert [own.mesh for own in result[: len(costs)]] == sorted(costs, key=costs.__getitem__)
        sorted_first.append((result[0].mesh, result[0].mesh != setups[0].mesh))
        return result

    def fastest_on(self, setup, known_s):
        searched.append(setup.mesh)
        return search(self, setup, known_s)

    monkeypatch.setattr(MeshSearch, "cheaper_first", cheaper_first)
    monkeypatch.setattr(MeshSearch, "fastest_on", fastest_on)
    for seed in range(6000, 6040):
        made = random_step(seed)
        step = Step(made.graph, made.scopes, made.from_literals, frozenset())
        sorted_first.clear()
        searched.clear()
        plan_dynamic(
            step,
            Request("auto_parallel", 16, None, None, (), frozenset(), (), (), frozenset()),
            random_machine(seed),
            DynamicOptions(max_axes=2, small_program=0),
        )
        for mesh, is_exchanged in sorted_first:
            others = [other for other in searched if sorted(other.shape) == sorted(mesh.shape)]
            assert others[0] == mesh
            if is_exchanged:
                return
    raise AssertionError("no second order was cheaper")
