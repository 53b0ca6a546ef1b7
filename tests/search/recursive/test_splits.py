"""The restricted search of recursive_programming: which states are left, and that cuts stand."""

import numpy as np
import pytest

from spmdctx.ir.domain import axis_codes
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.rules.contraction import dot_general
from spmdctx.rules.elementwise import elementwise
from spmdctx.search.problem.network import build_network
from spmdctx.search.problem.space import Space
from spmdctx.search.problem.tables import Tables
from spmdctx.search.recursive.splits import FewSplits
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.request import Setup
from spmdctx.search.solver.problem.graph import cost_of
from spmdctx.search.solver.solve import solve
from tests.road import CPU
from tests.search.graphs import GraphMaker

MESH = LogicalMesh.of((4, 2))
D, M = ("data",), ("model",)
NUMBERS = {"dimension_numbers": (((1,), (0,)), ((), ()))}
ONE, TWO = (elementwise(((64, 64),) * count, ((64, 64),), {}) for count in (1, 2))


def tables(cuts, mesh=MESH, **given):
    make = GraphMaker()
    rule = dot_general(((64, 64), (64, 64)), ((64, 64),), NUMBERS)
    result = make.op("dot_general", rule, make.input(64, 64), make.input(64, 64, role=Role.PARAMETER), shape=(64, 64))
    space = Space(make.graph(result), mesh, CPU, frozenset())
    setup = Setup(mesh, **given)
    marks = dict.fromkeys(setup.pins, 1)
    return FewSplits(build_network(space, (0,), marks, {}), space, setup, AlgoLimits(), cuts)


def splits_left(found):
    choices, costs = found.choices[0], found.problem().costs[0]
    codes = axis_codes(MESH)
    return {codes.sharding(row) for row in choices.split.rows[choices.states.split[np.isfinite(costs)]].tolist()}


def test_axes_are_used_in_the_order_of_the_mesh():
    left = splits_left(tables({}))
    assert ((*D, *M), (), ()) in left
    assert ((*M, *D), (), ()) not in left
    assert (D, M, ()) in left
    assert (M, D, ()) in left


@pytest.mark.parametrize("cut", [((), (), ()), (D, M, ()), ((*M, *D), (), ())])
def test_a_cut_is_the_only_split(cut):
    found = tables({0: cut})
    assert splits_left(found) == {cut}
    solution = solve(found.problem())
    assert found.assignment(solution.states, "recursive_programming").ops[0].axes == cut


def test_a_pin_in_another_order_is_kept():
    pin = ((*M, *D), ())
    found = tables({}, pins={0: pin})
    solution = solve(found.problem())
    assert found.assignment(solution.states, "recursive_programming").values[0] == pin


def test_arguments_lie_as_they_are_read_where_that_is_free():
    found = tables({0: ((), D, ())})
    solution = solve(found.problem())
    values = found.assignment(solution.states, "recursive_programming").values
    rule = found.space.graph.ops[0].rule
    read = tuple(D if rule.operands[0][dim] == (1,) else () for dim in (0, 1))
    assert values[0] == read


def test_on_one_axis_nothing_is_left_out():
    mesh = LogicalMesh.of((8,))
    found = tables({}, mesh)
    every = Tables.problem(found)
    assert all(np.isfinite(few).sum() == np.isfinite(own).sum() for few, own in zip(found.problem().costs, every.costs, strict=True))


def chained(mesh=MESH, **given):
    """x @ w, two element-wise ops on it, and an argument added."""
    make = GraphMaker()
    product = dot_general(((64, 64), (64, 64)), ((64, 64),), NUMBERS)
    x, w = make.input(64, 64), make.input(64, 64, role=Role.PARAMETER)
    made = make.op("dot_general", product, x, w, shape=(64, 64))
    for _ in range(2):
        made = make.op("tanh", ONE, made, shape=(64, 64))
    result = make.op("add", TWO, made, make.input(64, 64), shape=(64, 64))
    space = Space(make.graph(result), mesh, CPU, frozenset())
    setup = Setup(mesh, **given)
    network = build_network(space, (0,) * 4, dict.fromkeys(setup.pins, 1), {})
    return FewSplits(network, space, setup, AlgoLimits(), {})


def members(found, groups):
    """The members of the groups of several nodes, as sorts and ids of ops and values."""
    together = {}
    for node, group in zip(found.network.nodes, groups, strict=True):
        together.setdefault(group, []).append((node.sort, node.member))
    return [own for own in together.values() if len(own) > 1]


def test_element_wise_ops_go_with_what_is_made():
    found = chained()
    # The results of the four ops are values 2, 3, 4 and 6; value 5 is the argument that the last one adds.
    assert members(found, found.joined().groups) == [[("op", 1), ("op", 2), ("op", 3), ("slot", 2), ("slot", 3), ("slot", 4), ("slot", 6)]]


def test_what_is_pinned_goes_with_nothing():
    found = chained(pins={3: (D, ())})
    assert [own[0] for own in members(found, found.joined().groups)] == [("op", 1), ("op", 2)]
    assert all(("slot", 3) not in own for own in members(found, found.joined().groups))


@pytest.mark.parametrize("mesh", [MESH, LogicalMesh.of((8,))], ids=str)
def test_a_joined_problem_costs_what_its_states_cost_apart(mesh):
    found = chained(mesh)
    problem, joined = found.problem(), found.joined()
    solution = solve(joined.problem)
    apart = joined.of_nodes(solution)
    assert len(joined.problem.costs) < len(problem.costs)
    assert cost_of(problem.costs, problem.edges, apart.states) == pytest.approx(solution.cost, rel=1e-12)
    assert solution.cost >= solve(problem).cost * (1 - 1e-12)
