"""set_algo_parameters: each restricts candidates by itself, and plans end to end."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.context.state import DEFAULT_ALGO
from spmdctx.ir.graph import Op
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import project
from spmdctx.rules.builder import identity
from spmdctx.rules.contraction import dot_general
from spmdctx.search.setup.limits import AlgoLimits, is_elementwise

MESH = LogicalMesh.of({"data": 4, "model": 2})
D, M, DM = ("data",), ("model",), ("data", "model")
DOT = dot_general(((64, 48), (48, 96)), ((64, 96),), {"dimension_numbers": (((1,), (0,)), ((), ()))})
SEARCHES = ("recursive_programming", "dynamic_programming", "sharding_propagation")


def op(primitive, rule, num_operands=2):
    return Op(0, primitive, tuple(range(num_operands)), (num_operands,), rule, 0, 1)


def parameters(**changed):
    return replace(DEFAULT_ALGO, **changed, explicit=frozenset(changed))


def test_nothing_is_restricted_by_default():
    assert not AlgoLimits.of(DEFAULT_ALGO).restricts
    assert AlgoLimits.of(DEFAULT_ALGO) == AlgoLimits()


def test_fully_use_devices_counts_only_where_it_was_set():
    assert AlgoLimits.of(parameters(fully_use_devices=True)).fully_use_devices
    assert not AlgoLimits.of(parameters(fully_use_devices=False)).fully_use_devices


@pytest.mark.parametrize(("axes", "allowed"), [(((), (), ()), True), (((), DM, ()), True), (((), D, M), True), (((), D, ()), False)])
def test_fully_used_means_all_devices_or_none(axes, allowed):
    assert AlgoLimits(fully_use_devices=True).allows(op("dot_general", DOT), axes, MESH) == allowed


@pytest.mark.parametrize(("axes", "allowed"), [(((), D, ()), True), ((M, (), ()), False), (((), (), DM), False), (((), (), D), False)])
def test_slices_of_matrix_operands_stay_aligned(axes, allowed):
    """Factors are k=48, i=64, j=96: 64 / 4 is a multiple of 16, 48 / 2 and 96 / 8 and 96 / 4 are none."""
    limits = AlgoLimits(slice_multiple=16)
    assert limits.allows(op("dot_general", DOT), axes, MESH) == allowed
    assert limits.allows(op("sin", identity((64, 48)), 1), (M, ()), MESH)


@pytest.mark.parametrize(("axes", "allowed"), [((D, ()), True), (((), M), True), ((D, M), False), (((), ()), False)])
def test_an_elementwise_op_follows_one_of_its_operands(axes, allowed):
    add = op("add", identity((64, 48), num_operands=2))
    assert AlgoLimits(elementwise_follow=True).allows(add, axes, MESH, [(D, ()), ((), M)]) == allowed
    assert AlgoLimits(elementwise_follow=True).allows(add, axes, MESH)


def test_matrix_products_are_not_elementwise():
    assert is_elementwise(identity((8, 4), num_operands=2))
    assert not is_elementwise(DOT)


def chain(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x.sum()


def plan(mode, sizes=(64, 48, 64), batch=32, devices=8, **options):
    shapes = [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in pairwise(sizes)]
    x = jax.ShapeDtypeStruct((batch, sizes[0]), jnp.float32)
    context = {"parallel_mode": "auto_parallel", "search_mode": mode, "device_num": devices, "topology": "tpu-v5p"}
    return spmdctx.plan(chain, shapes, x, batch_argnums=1, **context, **options)


def slices(found):
    """Into how many parts each op of a plan is split."""
    mesh = found.logical_mesh
    return [mesh.num_slices(name for own in one.axes for name in own) for one in found.assignment.ops]


@pytest.mark.parametrize("mode", SEARCHES)
def test_every_op_uses_all_devices_or_none(mode):
    """A batch of 4 lets 8 devices be used in part only, unless that is forbidden."""
    spmdctx.set_algo_parameters(fully_use_devices=True)
    assert set(slices(plan(mode, batch=4))) <= {1, 8}


def test_devices_are_used_in_part_where_nothing_forbids_it():
    assert not set(slices(plan("sharding_propagation", batch=4))) <= {1, 8}


def operand_slices(found, primitive):
    """Local sizes of the split dimensions of the operands of some ops."""
    sizes = []
    for row, own in zip(found.ops, found.assignment.ops, strict=True):
        for dims in row.rule.operands if row.primitive == primitive else ():
            for (factor,), names in zip(dims, project(dims, own.axes), strict=True):
                if names:
                    sizes.append(row.rule.sizes[factor] // found.logical_mesh.num_slices(names))
    return sizes


@pytest.mark.parametrize("mode", SEARCHES)
def test_matrix_operands_are_cut_into_aligned_slices(mode):
    sizes = (4104, 4104, 4104)
    assert any(size % 16 for size in operand_slices(plan(mode, sizes), "dot_general"))
    spmdctx.set_algo_parameters(tensor_slice_align_enable=True, tensor_slice_align_size=16)
    assert not any(size % 16 for size in operand_slices(plan(mode, sizes), "dot_general"))


@pytest.mark.parametrize("mode", SEARCHES)
def test_elementwise_ops_take_the_sharding_of_their_operands(mode):
    spmdctx.set_algo_parameters(elementwise_op_strategy_follow=True)
    found = plan(mode)
    graph_ops, stored = found.op_table.operations, found.assignment.values
    followed = 0
    for op, own in zip(graph_ops, found.assignment.ops, strict=True):
        if op.primitive == "tanh":
            assert project(op.rule.operands[0], own.axes) == stored[op.operands[0]]
            followed += 1
    assert followed == 2


def test_an_approximate_search_keeps_the_first_plan_within_epsilon():
    exact = plan("recursive_programming", batch=8)
    spmdctx.set_algo_parameters(enable_algo_approxi=True, algo_approxi_epsilon=1.0)
    rough = plan("recursive_programming", batch=8)
    assert rough.cost.total_s >= exact.cost.total_s * (1 - 1e-6)
