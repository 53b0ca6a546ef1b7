"""Values that depend on no input go as their readers ask."""

import pytest

from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.machine.presets import topology
from spmdctx.search.dynamic.plans.free_values import place_free_values
from spmdctx.search.problem.space import Space
from tests.search.random_graphs import StepMaker

MESH = LogicalMesh.of((2, 2))
D, M, NO = ("data",), ("model",), ()


def _masked(*splits, pins=None):
    """exp(iota) times as many inputs as there are splits, each product split so: the places of iota and exp, and exp's split."""
    make = StepMaker()
    iota = make.op("iota", shape=(8, 8), dimension=0, dtype="float32", shape_=(8, 8))
    mask = make.same("exp", iota)
    results = [make.same("mul", make.input(8, 8, role=Role.BATCH), mask) for _ in splits]
    step = make.finish(*results)
    axes = [(NO, NO), (NO, NO), *splits]
    values = [(NO, NO) for _ in step.graph.values]
    given = Assignment(tuple(OpSharding(own) for own in axes), tuple(values), "")
    placed = place_free_values(Space(step.graph, MESH, topology("h100"), step.from_literals), given, pins or {})
    return placed.values[iota], placed.values[mask], placed.ops[1].axes


@pytest.mark.parametrize("split", [(D, NO), (NO, M), (D, M), (("data", "model"), NO)])
def test_a_chain_of_free_values_is_split_as_its_reader_is(split):
    assert _masked(split) == (split, split, split)


def test_only_dimensions_on_which_all_readers_agree_are_split():
    assert _masked((D, M), (D, NO))[1] == (D, NO)
    assert _masked((D, M), (M, D))[1] == (NO, NO)


def test_a_pin_of_a_free_value_is_kept():
    mask = 1
    assert _masked((D, M), pins={mask: (NO, NO)})[1] == (NO, NO)
    assert _masked((D, M), pins={mask: (M, None)})[1] == (M, NO)
    assert _masked((D, M), pins={mask: (None, M)})[1] == (D, M)


def test_what_no_free_value_needs_stays_as_it_is():
    make = StepMaker()
    x = make.input(8, 8)
    step = make.finish(make.same("tanh", x))
    given = Assignment((OpSharding((D, NO)),), ((D, NO), (D, NO)), "")
    assert place_free_values(Space(step.graph, MESH, topology("h100"), step.from_literals), given, {}) is given
