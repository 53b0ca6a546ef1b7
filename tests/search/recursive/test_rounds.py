"""The rounds of recursive_programming on hand-made and traced graphs."""

import logging

import jax
import jax.numpy as jnp
import pytest

from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.rules.builder import identity
from spmdctx.rules.contraction import dot_general
from spmdctx.search.problem.space import Space
from spmdctx.search.recursive.mesh import round_mesh
from spmdctx.search.recursive.rounds import Roots, backward_products, decide, log_rounds, main_ops
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.request import Setup
from tests.road import CPU, ops, trace
from tests.search.graphs import GraphMaker

A, B, C = "data", "model", "axis2"
NUMBERS = {"dimension_numbers": (((1,), (0,)), ((), ()))}


def product(make, lhs, rhs, i, k, j):
    return make.op("dot_general", dot_general(((i, k), (k, j)), ((i, j),), NUMBERS), lhs, rhs, shape=(i, j))


def one_product(i, k, j, num_devices, mem_coeff=0.1, limits=None, **given):
    make = GraphMaker()
    result = product(make, make.input(i, k), make.input(k, j, role=Role.PARAMETER), i, k, j)
    return rounds_of(make.graph(result), num_devices, mem_coeff, limits, **given)


def rounds_of(graph, num_devices, mem_coeff=0.1, limits=None, mesh=None, **given):
    mesh = mesh or round_mesh(num_devices)
    space = Space(graph, mesh, CPU, frozenset(), limits)
    roots = Roots(graph)
    inputs = {index: roots.inputs(graph.ops[index]) for index in main_ops(graph)}
    return decide(space, Setup(mesh, **given), mem_coeff, backward_products(graph), inputs)


def cut_names(decided, index=0):
    """The chosen cut of each round."""
    return [step.chosen.cut for step in decided.decisions[index].rounds]


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, logger="spmdctx")


def test_the_product_of_the_guide_on_two_devices():
    assert cut_names(one_product(128, 64, 64, 2, 0.01)) == ["no"]
    assert cut_names(one_product(128, 64, 64, 2, 0.013)) == ["I"]


def test_columns_are_forbidden_once_the_contraction_is_cut(caplog):
    """Local sizes 64, 32 and 128 after one cut of K: the third figure block of the guide."""
    pinned = {0: ((), (A,))}
    decided = one_product(64, 64, 128, 4, 0.01, pins=pinned)
    step = decided.decisions[0].rounds[0]
    assert step.edges == "i=64, k=32, j=128"
    log_rounds(decided.space.graph, decided.space.mesh, decided.decisions, [0])
    text = caplog.text
    for line in ("op-cost is 20.48", "op-cost is 4096", "op-cost is 16.7772", "The J-axis is forbidden", "Choose NOT to cut"):
        assert line in text


def test_rows_are_cut_until_a_cut_of_the_weight_is_cheaper():
    """I costs 0.1 x 256 x 256 / 2 = 3276.8; J costs 128 rows: 16384, 64: 8192, 32: 4096, 16: 2048."""
    assert cut_names(one_product(128, 256, 256, 16, 0.1)) == ["I"] * 3 + ["J"]


def test_an_axis_is_cut_only_while_its_edge_is_even():
    """60, 100 and 140 are even twice; contraction and columns exclude each other."""
    decided = one_product(60, 100, 140, 32, 1.0)
    assert cut_names(decided) == ["J", "J", "I", "I", "no"]


def test_an_odd_device_count_is_cut_by_its_prime_factors():
    decided = one_product(96, 64, 64, 6, 0.1)
    assert [step.parts for step in decided.decisions[0].rounds] == [3, 2]
    assert cut_names(decided) == ["I", "I"]


def test_what_comes_before_is_followed():
    """The second product would rather cut its columns, but its operand is cut along the rows already."""
    make = GraphMaker()
    hidden = product(make, make.input(64, 32), make.input(32, 64, role=Role.PARAMETER), 64, 32, 64)
    active = make.op("tanh", identity((64, 64)), hidden, shape=(64, 64))
    result = product(make, active, make.input(64, 4096, role=Role.PARAMETER), 64, 64, 4096)
    decided = rounds_of(make.graph(result), 2)
    assert cut_names(decided, 0) == ["I"]
    assert cut_names(decided, 2) == ["I"]
    assert [option.rest_cost for option in decided.decisions[2].rounds[0].options] == [0.0, *[16.0 * 64 * 64] * 3]
    alone = one_product(64, 64, 4096, 2)
    assert cut_names(alone) == ["J"]


def test_the_weight_may_be_the_left_operand():
    make = GraphMaker()
    hidden = make.op("tanh", identity((256, 4096)), make.input(256, 4096), shape=(256, 4096))
    result = product(make, make.input(64, 256, role=Role.PARAMETER), hidden, 64, 256, 4096)
    decided = rounds_of(make.graph(result), 2, seeds={0: ((), (A,))})
    assert cut_names(decided, 1) == ["I"]
    assert decided.decisions[1].axes.index((A,)) == 2


def test_a_pin_decides_its_round():
    decided = one_product(128, 64, 64, 4, pins={1: ((), (A,))})
    assert cut_names(decided) == ["I"]
    assert decided.decisions[0].axes == ((), (B,), (A,))


def test_a_forced_op_is_not_decided():
    decided = one_product(128, 64, 64, 2, forced={0: ((), (), ())})
    assert decided.decisions == {}


def test_a_seed_of_the_batch_yields_to_its_first_reader():
    decided = one_product(128, 64, 64, 2, 0.01, seeds={0: ((A,), ())})
    state = decided.spreader.state
    assert [decided.space.shardings[state[slot]] for slot in (0, 1, 2)] == [((), ())] * 3


def test_slices_stay_aligned():
    decided = one_product(40, 64, 64, 2, 0.1, AlgoLimits(slice_multiple=16))
    assert cut_names(decided) == ["J"]


def test_all_devices_or_none_are_used():
    assert decided_slices(one_product(4, 255, 255, 8, 0.01)) == 4
    assert decided_slices(one_product(4, 255, 255, 8, 0.01, AlgoLimits(fully_use_devices=True))) == 1


def decided_slices(decided):
    return decided.space.mesh.num_slices(name for names in decided.decisions[0].axes for name in names)


def test_a_convolution_is_cut_along_the_batch_and_then_along_channels():
    x, w = jnp.ones((4, 8, 10, 10)), jnp.ones((16, 8, 3, 3))
    program = trace(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"), x, w)
    decided = rounds_of(program.graph, 8)
    (decision,) = decided.decisions.values()
    assert [step.chosen.cut for step in decision.rounds] == ["B", "B", "K"]


def test_attention_is_cut_along_batch_and_heads():
    q = jnp.ones((64, 8, 16, 32))
    program = trace(lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k), q, q)
    (decision,) = rounds_of(program.graph, 4).decisions.values()
    assert [step.chosen.cut for step in decision.rounds] == ["B", "B"]


def loss(w1, w2, x):
    return jnp.tanh(x @ w1 @ w2).sum()


def test_products_of_the_backward_pass_follow():
    x, w = jnp.ones((32, 64)), jnp.ones((64, 64))
    program = trace(jax.grad(loss, argnums=(0, 1)), w, w, x)
    dots = ops(program, "dot_general")
    assert len(dots) == 5
    assert backward_products(program.graph) == {op.id for op in dots[2:]}


def test_products_that_share_an_operand_are_not_taken_for_backward_ones():
    x, w = jnp.ones((32, 64)), jnp.ones((64, 64))
    program = trace(lambda x, a, b: (x @ a) * (x @ b), x, w, w)
    assert not backward_products(program.graph)


def test_decisions_do_not_depend_on_the_mesh_names():
    mesh = LogicalMesh.of({"p": 2, "q": 2, "r": 2})
    found = one_product(128, 256, 512, 8)
    other = one_product(128, 256, 512, 8, mesh=mesh)
    assert [len(names) for names in found.decisions[0].axes] == [len(names) for names in other.decisions[0].axes]
