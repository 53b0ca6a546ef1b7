"""Gradients and their order, found from the graph of a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import spmdctx
from spmdctx.gradients.dependence import first_uses
from spmdctx.ir.analysis.gradient_order import carriers, gradient_order
from spmdctx.ir.graph import Role
from spmdctx.step.planning import assemble
from tests.road import trace
from tests.zoo import UNSPLIT, case

SHAPES = {"late": (8, 4), "bias": (4,), "early": (6, 8)}


def loss(weights, x):
    return jnp.mean((jnp.tanh(x @ weights["early"]) @ weights["late"] + weights["bias"]) ** 2)


def arguments():
    return {name: jnp.ones(shape) for name, shape in SHAPES.items()}, jnp.ones((16, 6))


def paths(step, *args, mode="data_parallel"):
    return [one.path for one in spmdctx.parallel(step, parallel_mode=mode, device_num=8).plan(*args).gradients]


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "lamb": optax.lamb(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "accumulated": optax.MultiSteps(optax.adam(0.1), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_ordered_by_first_use_whatever_the_optimizer(name):
    optimizer = OPTIMIZERS[name]

    def step(state, x):
        weights, inner = state
        gradients = jax.grad(loss)(weights, x)
        updates, inner = optimizer.update(gradients, inner, weights)
        return optax.apply_updates(weights, updates), inner

    weights, x = arguments()
    found = paths(step, (weights, optimizer.init(weights)), x)
    assert [path.rpartition("/")[2] for path in found] == ["early", "late", "bias"]


@pytest.mark.parametrize("prepared", [lambda one: checkpoint_name(one, "weight"), jnp.copy, lambda one: lax.reduce_precision(one, 8, 7)])
def test_names_copies_and_roundings_before_the_forward_pass_are_no_use(prepared):
    def step(weights, x):
        return jax.tree.map(jnp.subtract, weights, jax.grad(lambda given: loss(jax.tree.map(prepared, given), x))(weights))

    graph = trace(step, *arguments(), roles=[Role.PARAMETER] * 3 + [Role.BATCH], carried=[(0, 0), (1, 1), (2, 2)]).graph
    assert [one.path for one in gradient_order(graph)] == ["leaf1", "leaf2", "leaf0"]


def test_a_broadcast_is_a_use_although_it_only_prepares_for_the_sum():
    def spread_first(weights, x):
        bias = lax.broadcast_in_dim(weights["bias"], (16, 4), (1,))
        return jnp.mean((jnp.tanh(x @ weights["early"]) @ weights["late"] + bias) ** 2)

    def step(weights, x):
        return jax.tree.map(jnp.subtract, weights, jax.grad(spread_first)(weights, x))

    graph = trace(step, *arguments(), roles=[Role.PARAMETER] * 3 + [Role.BATCH], carried=[(0, 0), (1, 1), (2, 2)]).graph
    assert [one.path for one in gradient_order(graph)] == ["leaf0", "leaf1", "leaf2"]
    assert first_uses(jax.make_jaxpr(spread_first)(*arguments())) == first_uses(jax.make_jaxpr(loss)(*arguments()))


def test_casts_before_the_forward_pass_are_no_use():
    def step(weights, x):
        low = jax.tree.map(lambda one: one.astype(jnp.bfloat16), weights)
        gradients = jax.grad(loss)(low, x)
        return jax.tree.map(lambda one, more: one - more.astype(one.dtype), weights, gradients)

    assert paths(step, *arguments()) == ["weights/early", "weights/late", "weights/bias"]


def test_gradients_that_are_returned_come_in_the_order_of_the_forward_pass_too():
    found = paths(lambda weights, x: jax.value_and_grad(loss)(weights, x), *arguments())
    assert [path.rpartition("/")[2] for path in found] == ["early", "late", "bias"]


@pytest.mark.parametrize(("name", "flavor"), [("transformer", "pytree"), ("lstm", "linen"), ("tied", "nnx"), ("vit", "linen")])
def test_every_trained_parameter_of_a_model_has_one_gradient(name, flavor):
    """Layers in scans and loops, weights cut from one stack or put together for one product, a table that is read twice."""
    one = case(name, flavor)
    step, args = one.make(UNSPLIT, jnp.float32)
    plan = spmdctx.parallel(step, parallel_mode="data_parallel", device_num=8).plan(*args)
    parameters = {leaf.path for leaf in plan.inputs if leaf.role.value == "parameter"}
    assert len(plan.gradients) == len({one.path for one in plan.gradients})
    assert {one.path for one in plan.gradients} == parameters


def buckets(step, *args, **options):
    plan = spmdctx.parallel(step, **{"device_num": 8, "topology": "h100", **options}).plan(*args)
    return [one.bucket for one in plan.gradients]


def test_buckets_are_cut_at_the_indices_and_only_where_the_context_asks_for_them():
    def step(weights, x):
        return jax.tree.map(lambda one, more: one - more, weights, jax.grad(loss)(weights, x))

    assert buckets(step, *arguments(), parallel_mode="data_parallel") == [None] * 3
    assert buckets(step, *arguments(), parallel_mode="data_parallel", all_reduce_fusion_config=[1]) == [0, 1, 1]
    assert buckets(step, *arguments(), parallel_mode="data_parallel", all_reduce_fusion_config=[7]) == [0, 0, 0]
    off = {"all_reduce_fusion_config": [1], "comm_fusion": {"openstate": False}}
    assert buckets(step, *arguments(), parallel_mode="data_parallel", **off) == [None] * 3


def test_what_is_used_inside_of_shard_with_a_fusion_number_has_a_bucket_of_its_own():
    def grouped(weights, x):
        first = spmdctx.shard(jnp.matmul, ((8, 1), (1, 1)), fusion=2)
        second = spmdctx.shard(jnp.matmul, ((8, 1), (1, 1)))
        return jnp.mean((second(jnp.tanh(first(x, weights["early"])), weights["late"]) + weights["bias"]) ** 2)

    def step(weights, x):
        return jax.tree.map(lambda one, more: one - more, weights, jax.grad(grouped)(weights, x))

    assert buckets(step, *arguments(), parallel_mode="semi_auto_parallel") == [0, 1, 1]
    assert buckets(step, *arguments(), parallel_mode="semi_auto_parallel", all_reduce_fusion_config=[2]) == [0, 1, 2]


def test_a_sum_is_carried_behind_the_linear_ops_that_alone_read_it():
    graph = trace(lambda x: (x.sum(0).reshape(2, 4) + 1.0) ** 2, jnp.ones((4, 8))).graph
    (value,) = [op.results[0] for op in graph.ops if op.primitive == "reduce_sum"]
    assert [op.primitive for op in graph.ops if op.results[0] == carriers(graph, [value])[value]] == ["add"]


def test_a_step_that_trains_nothing_has_no_gradients():
    assert gradient_order(trace(lambda x: x * 2, jnp.ones(8)).graph) == ()


def test_buckets_that_find_no_gradient_are_said_to_have_no_effect():
    parallel = spmdctx.parallel(lambda x: x * 2, parallel_mode="data_parallel", device_num=8, all_reduce_fusion_config=[3])
    with pytest.warns(spmdctx.ContextWarning, match="all_reduce_fusion_config has no effect: no gradient is found"):
        plan = parallel.plan(jnp.ones((8, 4)))
    assert any("no gradient is found" in note for note in plan.notes)


def test_gradients_that_nothing_groups_are_found_when_they_are_read(monkeypatch):
    calls = []
    monkeypatch.setattr("spmdctx.cost.price.gradients.gradient_order", lambda graph: calls.append(graph) or gradient_order(graph))
    monkeypatch.setattr(assemble, "gradient_order", lambda graph: calls.append(graph) or gradient_order(graph))

    def step(weights, x):
        return jax.tree.map(lambda one, more: one - more, weights, jax.grad(loss)(weights, x))

    plan = spmdctx.plan(step, *arguments(), parallel_mode="data_parallel", device_num=8)
    assert not calls
    assert [one.path for one in plan.gradients] == ["weights/early", "weights/late", "weights/bias"]
    assert len(calls) == 1
