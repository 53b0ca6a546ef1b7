"""The nodes and edges of a planning problem."""

from dataclasses import replace

from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import topology
from spmdctx.search.problem.network import build_network
from spmdctx.search.problem.space import Space
from spmdctx.search.problem.states import Joins
from tests.search.random_graphs import StepMaker

MESH = LogicalMesh.of((2, 2))
MACHINE = topology("h100")


def _network(step, machine=MACHINE, pins=None, forced=None):
    return build_network(Space(step.graph, MESH, machine, step.from_literals), step.scopes, pins or {}, forced or {})


def _sorts(network):
    return [node.sort for node in network.nodes]


def _gradient(outputs=()):
    """The sum of two products, and what reads it."""
    make = StepMaker()
    left, right = (make.dot(make.input(8, 8), make.input(8, 8, role=Role.PARAMETER)) for _ in range(2))
    total = make.same("add_any", left, right)
    make.same("tanh", total)
    return make.finish(*(value for value, kept in zip((left, right, total), outputs, strict=False) if kept))


def test_every_value_has_a_place_and_some_may_be_handed_on_unreduced():
    network = _network(_gradient())
    assert [node.joins for node in network.nodes[:4]] == [Joins(False, True), Joins(False, True), Joins(True, False), Joins(False, False)]
    assert _sorts(network).count("slot") == 4 + 4
    assert [node.joins.hands_on for node in network.nodes[4:]].count(True) == 2
    assert len(network.fixed_slots) == 4


def test_terms_that_someone_else_sees_are_reduced_where_they_are_made():
    assert not any(node.joins.takes for node in _network(_gradient(outputs=(True,))).nodes)
    pinned = _gradient()
    term = pinned.graph.ops[0].results[0]
    assert not any(node.joins.takes for node in _network(pinned, pins={term: 1}).nodes)


def test_no_sum_is_joined_where_the_compiler_does_not():
    assert not any(node.joins.takes for node in _network(_gradient(), replace(MACHINE, merges_partial_sums=False)).nodes)


def test_products_of_one_computation_share_what_they_read():
    make = StepMaker()
    x = make.input(8, 8)
    for scope in (0, 0, 1):
        make.scope = scope
        make.dot(x, make.input(8, 8))
    make.same("tanh", x)
    network = _network(make.finish())
    assert list(network.uses) == [(x, 0)]
    readers = [carry.target for carry in network.carries if carry.source.node == network.uses[x, 0]]
    assert len(readers) == 2


def test_an_edge_weighs_as_often_as_it_is_used():
    make = StepMaker()
    x = make.input(8, 8)
    make.repeats = 5
    make.same("tanh", x)
    network = _network(make.finish())
    assert sorted(load.weight for load in network.carries.values()) == [5, 5]


def test_gathers_of_weights_weigh_less_where_they_hide():
    make = StepMaker()
    make.dot(make.input(8, 8, role=Role.BATCH), make.input(8, 8, role=Role.PARAMETER))
    network = _network(make.finish(), replace(MACHINE, gather_overlap=0.75))
    assert sorted((load.weight, load.times) for load in network.carries.values()) == [(0.25, 1), (1, 1), (1, 1)]


def test_tied_values_have_one_place():
    make = StepMaker()
    state = make.input(8, 8, role=Role.PARAMETER)
    after = make.same("tanh", state)
    make.ties.append((state, after))
    network = _network(make.finish(after))
    assert _sorts(network) == ["op", "slot"]
    assert len(network.carries) == 2


def test_values_that_depend_on_no_input_take_no_part():
    make = StepMaker()
    mask = make.op("iota", shape=(8, 8), dimension=0, dtype="float32", shape_=(8, 8))
    make.same("mul", make.input(8, 8), mask)
    network = _network(make.finish())
    assert _sorts(network) == ["op", "slot", "slot"]
