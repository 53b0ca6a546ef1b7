"""Collectives over axes of vmap: reductions in the plan, and the numbers of one device in every mode."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx.trace.capture.portable.step import portable

W = jax.random.normal(jax.random.key(0), (16, 6)) / 4
X = jax.random.normal(jax.random.key(1), (8, 16))


def batched(fn, groups=4, **options):
    return lambda w, x: jax.vmap(lambda x: fn(w, x), axis_name="i", **options)(x.reshape(groups, -1, 16))


def mean_square(w, x):
    return lax.pmean(jnp.mean((x @ w) ** 2), "i")


def nested(w, x):
    inner = jax.vmap(lambda x: lax.pmax(x @ w, ("i", "j")) + lax.psum(x @ w, "j") - lax.pmin(x @ w, "i"), axis_name="j")
    return jax.vmap(inner, axis_name="i")(x.reshape(2, 4, 16))


def in_a_scan(w, x):
    return lax.scan(lambda c, x: (c + lax.psum(jnp.tanh(x @ w), "i").sum(0), lax.pmean(c, "i")), jnp.zeros(6), x[None])


def gradient(w, x):
    return jax.grad(lambda w: batched(mean_square, out_axes=None)(w, x))(w)


def gradient_of_each(w, x):
    """A gradient for each replica, averaged as in code for pmap."""
    return batched(lambda w, x: lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), "i"), out_axes=None)(w, x)


def checkpointed(w, x):
    return jax.grad(lambda w: batched(jax.checkpoint(lambda w, x: lax.psum(jnp.tanh(x @ w), "i").sum()), out_axes=None)(w, x))(w)


def moved(w, x):
    """Those that JAX batches to other ops."""

    def one(w, x):
        y = lax.all_gather(x @ w, "i") + lax.ppermute(x @ w, "i", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return y + lax.all_to_all(y, "i", 0, 0) + lax.axis_index("i") + lax.psum_scatter(y, "i")

    return batched(one)(w, x)


def normalized(w, x):
    norm = nn.BatchNorm(use_running_average=False, axis_name="i")
    state = norm.init(jax.random.key(0), jnp.zeros((2, 6)))

    def loss(w):
        return batched(lambda w, x: norm.apply(state, x @ w, mutable=["batch_stats"])[0] ** 3, 4)(w, x).mean()

    return jax.grad(loss)(w)


STEPS = {
    "sum": batched(lambda w, x: lax.psum(x @ w, "i"), out_axes=None),
    "maximum": batched(lambda w, x: lax.pmax(x @ w, "i")),
    "minimum of integers": batched(lambda w, x: lax.pmin((9 * x @ w).astype(jnp.int32), "i"), 2),
    "some dims": lambda w, x: jax.vmap(lambda x: lax.psum(x, "i") @ w, in_axes=1, out_axes=1, axis_name="i")(x.reshape(2, 4, 16)),
    "unmapped": batched(lambda w, x: x + lax.psum(w.sum(), "i")),
    "nested": nested,
    "scan": batched(in_a_scan),
    "gradient": gradient,
    "gradient of each": gradient_of_each,
    "checkpoint": checkpointed,
    "moved": moved,
    "batch norm": normalized,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_with_an_axis_of_vmap_computes_what_one_device_does(name):
    step = STEPS[name]
    for got, want in zip(
        jax.tree.leaves(spmdctx.parallel(step, parallel_mode="auto_parallel")(W, X)), jax.tree.leaves(jax.jit(step)(W, X)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "data_parallel", "hybrid_parallel", "stand_alone"])
@pytest.mark.parametrize("name", ["nested", "gradient of each"])
def test_other_modes_do_too(mode, name):
    got, want = spmdctx.parallel(STEPS[name], parallel_mode=mode)(W, X), jax.jit(STEPS[name])(W, X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "primitive"), [("sum", "reduce_sum"), ("maximum", "reduce_max"), ("minimum of integers", "reduce_min"), ("scan", "reduce_sum")]
)
def test_it_is_a_reduction_in_the_plan(name, primitive):
    plan = spmdctx.plan(STEPS[name], W, X, parallel_mode="auto_parallel")
    kinds = {op.primitive for op in plan.ops}
    assert primitive in kinds
    assert kinds.isdisjoint({"psum", "pmax", "pmin"})
    assert not [note for note in plan.notes if "communicates" in note]


def test_a_sum_over_the_batch_costs_what_a_plain_sum_costs():
    structs = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((8192, 1024), jnp.float32)

    def named(w, x):
        return w - jax.grad(lambda w: jax.vmap(lambda x: lax.pmean(((x @ w) ** 2).sum(), "i"), axis_name="i", out_axes=None)(x))(w)

    def plain(w, x):
        return w - jax.grad(lambda w: ((x @ w) ** 2).sum(1).mean())(w)

    options = {"parallel_mode": "auto_parallel", "device_num": 8, "topology": "tpu-v5p"}
    costs = [spmdctx.plan(step, *structs, **options).cost.total_s for step in (named, plain)]
    assert costs[0] == pytest.approx(costs[1], rel=0.01)


def joined(x):
    return lax.psum(x, ("i", "data")) + lax.pmax(x, ("data", "i"))


def one_by_one(x):
    return lax.psum(lax.psum(x, "data"), "i") + lax.pmax(lax.pmax(x, "i"), "data")


@pytest.mark.parametrize("body", [joined, one_by_one])
def test_over_a_mesh_axis_too_only_the_mesh_axis_stays(body):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x):
        return jax.vmap(body, axis_name="i", out_axes=None)(x.reshape(2, -1, 16))

    step = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    x = jnp.arange(16.0 * 16).reshape(16, 16)
    program, _ = portable(jax.make_jaxpr(step)(x), 8)
    (region,) = [eqn for eqn in program.eqns if eqn.primitive.name == "shard_map"]
    axes = [eqn.params["axes"] for eqn in region.params["jaxpr"].eqns if eqn.primitive.name in ("psum", "psum_invariant", "pmax")]
    assert axes == [("data",), ("data",)]
    np.testing.assert_allclose(spmdctx.parallel(step, parallel_mode="data_parallel", mesh={"data": 8})(x), step(x), rtol=1e-6)


def test_a_local_loss_may_reduce_over_an_axis_of_vmap():
    def step(w, x):
        return spmdctx.value_and_grad(lambda w, x: batched(mean_square, 1, out_axes=None)(w, x))(w, x)

    got = spmdctx.parallel(step, parallel_mode="data_parallel", gradients_mean=True)(W, X)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(W, X)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_body_that_many_calls_share_stays_one():
    shared = jax.jit(lambda x: lax.psum(x, "i"))
    program = jax.make_jaxpr(lambda x: jax.vmap(lambda x: shared(x) + shared(x), axis_name="i")(x))(X)
    rewritten, _ = portable(program, 8)
    bodies = [eqn.params["jaxpr"].jaxpr for eqn in rewritten.eqns if eqn.primitive.name == "jit"]
    assert len(bodies) == 2
    assert bodies[0] is bodies[1]
