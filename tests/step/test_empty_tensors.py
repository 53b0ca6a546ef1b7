"""Tensors without elements: XLA makes them whole on every device, so no plan splits them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import spmdctx
from benchmarks.harness_cases import WAYS
from spmdctx.rules import rule_for

X = jnp.arange(64.0).reshape(8, 8)
EMPTY = jnp.zeros((8, 0))


def cropped(x):
    return lax.pad(x, jnp.float32(0), [(0, 0, 0), (-4, -4, 0)]), x.sum()


def without_channels(x):
    return lax.conv_general_dilated(jnp.zeros((8, 0, 4)), jnp.zeros((3, 0, 1)), (1,), "VALID") + x.sum(), jnp.sin(EMPTY) * x[:, :1]


def contracted_over_nothing(x):
    nothing = x[:, :0]
    return nothing @ jnp.zeros((0, 8)) + x, nothing.T @ x


def loop_with_an_empty_carry(x):
    return lax.scan(lambda carry, row: (jnp.cos(carry), (carry, row * 2)), jnp.zeros((8, 0)) + x[:, :1], x)


def factored(x):
    return jnp.linalg.cholesky(jnp.zeros((8, 0, 0)) + x[:, :1, None]), jnp.linalg.svd(jnp.zeros((8, 3, 0)) + x[:, :1, None])


def reshaped(x):
    return x[:, :0].reshape(0, 8), x[:0].reshape(8, 0), jnp.concatenate([x[:, :0], x], axis=1)


def sorted_and_drawn(x):
    return jnp.sort(x[:, :0], axis=0), jax.random.normal(jax.random.key(0), (8, 0)) + x[:, :1], x[:, :0].sum(axis=1)


def turned_by_nothing(x):
    return jnp.roll(x, (0, 0), (0, 1)), *jnp.split(jnp.sin(x), [0, 3], axis=1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fn",
    [
        *(cropped, without_channels, contracted_over_nothing, loop_with_an_empty_carry, factored, reshaped, sorted_and_drawn),
        turned_by_nothing,
    ],
)
def test_results_without_elements_can_be_read(fn, way):
    step = spmdctx.parallel(lambda x: fn(x), device_num=8, batch_argnums=0, **WAYS[way])
    jax.tree.map(np.testing.assert_allclose, step(X), jax.jit(fn)(X))
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(step(X)) if leaf.size == 0)


@pytest.mark.parametrize("way", WAYS)
def test_state_without_elements_is_kept(way):
    def update(state, batch):
        used = (batch["x"] @ state["w"]).mean() + batch["none"].sum() + state["none"].sum()
        return jax.tree.map(lambda leaf: leaf - used, state), used

    state, batch = {"w": X, "none": jnp.zeros((16, 0))}, {"x": X, "none": EMPTY}
    options = {**WAYS[way], "enable_parallel_optimizer": way != "semi_auto_parallel" and way != "data_parallel"}
    step = spmdctx.parallel(update, device_num=8, **options)
    wanted = update(*update(state, batch)[:1], batch)
    found = step(step(state, batch)[0], batch)
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, rtol=1e-5), found, wanted)


def test_a_strategy_on_a_tensor_without_elements_splits_nothing():
    step = spmdctx.parallel(
        lambda x: (spmdctx.shard(jnp.cos, in_strategy=((8, 1),))(x[:, :0]), spmdctx.shard(jnp.sin, in_strategy=((8, 1),))(x)),
        parallel_mode="semi_auto_parallel",
        device_num=8,
    )
    empty, full = step(X)
    assert np.asarray(empty).shape == (8, 0)
    assert not full.is_fully_replicated


def test_a_constraint_on_a_result_without_elements_splits_nothing():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    split = jax.sharding.NamedSharding(mesh, PartitionSpec("d"))

    def constrained(x):
        return lax.with_sharding_constraint(x[:, :0], split), lax.with_sharding_constraint(x * 2, split)

    empty, full = spmdctx.parallel(constrained, parallel_mode="auto_parallel", mesh=mesh)(X)
    assert np.asarray(empty).shape == (8, 0)
    assert full.sharding.spec == PartitionSpec("d")


def test_a_shard_map_may_take_and_give_nothing():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    rows = PartitionSpec("d")
    body = jax.shard_map(lambda x, none: (x[:, :0], x + none.sum()), mesh=mesh, in_specs=(rows, rows), out_specs=(rows, rows))
    for mode in ("auto_parallel", "hybrid_parallel"):
        empty, full = spmdctx.parallel(lambda x: body(x, x[:, :0]), parallel_mode=mode, mesh=mesh)(X)
        assert np.asarray(empty).shape == (8, 0)
        np.testing.assert_array_equal(full, X)


def test_what_a_split_leaves_is_split():
    """jnp.roll by nothing along two dimensions cuts off no elements; pictures need not be gathered for it."""

    def turned(x):
        return jnp.roll(jnp.sin(x), (0, 0), (1, 2)) * 2

    step = spmdctx.parallel(turned, parallel_mode="data_parallel", device_num=8)
    x = jnp.ones((16, 8, 8))
    assert step.plan(x).cost.communication_s == 0
    assert step.audit(x).ok
    rule = rule_for("split", ((8, 4),), ((8, 0), (8, 4)), {"axis": 1, "sizes": (0, 4)})
    assert rule.results == (((), ()), ((0,), (1,)))
    assert rule.splittable[0]


def test_a_rule_leaves_out_what_has_no_elements():
    shapes = ((8, 0), (0, 4)), ((8, 4),)
    rule = rule_for("dot_general", *shapes, {"dimension_numbers": (((1,), (0,)), ((), ()))})
    assert rule.operands == (((), ()), ((), ()))
    assert rule.results == (((0,), (1,)),)


def scanned_prefixes(x):
    return lax.associative_scan(jnp.add, x, axis=1), x.sum(axis=0)


def convolved_to_nothing(x):
    wide = (x @ x.T).reshape(8, 2, 4)
    return lax.conv_general_dilated(wide, jnp.ones((3, 4, 1)), (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")), x * 2


def cut_from_a_carry(x):
    return lax.scan(lambda carry, row: (carry * 2, carry[:0] + row[:0]), x.sum(axis=0), x)


@pytest.mark.parametrize("fn", [scanned_prefixes, convolved_to_nothing, cut_from_a_carry])
@pytest.mark.parametrize("mode", ["sharding_propagation", "dynamic_programming"])
def test_nothing_moves_for_results_without_elements(fn, mode):
    step = spmdctx.parallel(
        lambda x: fn(spmdctx.shard(jnp.sin, ((1, 8),))(x)), parallel_mode="auto_parallel", search_mode=mode, device_num=8
    )
    report = step.audit(X)
    assert report.ok, report


def test_ops_read_nothing_for_results_without_elements():
    plan = spmdctx.parallel(convolved_to_nothing, parallel_mode="auto_parallel", device_num=8).plan(X)
    assert not any(op.primitive == "dot_general" for op in plan.ops)
