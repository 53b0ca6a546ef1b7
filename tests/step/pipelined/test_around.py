"""What a step computes before its loss runs on the stages that read it; broadcast state and verify know several groups of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdctx
from tests.processes import work_pipeline as work
from tests.step.pipelined import small

TABLE = np.linspace(0.5, 1.5, work.WIDTH)


def step(params, batch, key, scale):
    noisy = batch["x"] * TABLE + scale * jax.random.normal(key, batch["x"].shape, batch["x"].dtype)
    half = jax.tree.map(lambda leaf: leaf * 0.5, params)

    def loss(half, x, y):
        for own in half["layers"]:
            x = x + jnp.tanh(x @ own["w"] + own["b"])
        return jnp.mean((x - y) ** 2)

    value, gradient = spmdctx.value_and_grad(loss)(half, noisy, batch["y"])
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, gradient), value, scale * 2


def test_values_before_the_loss_are_computed_on_each_stage():
    with jax.enable_x64(True):
        params = {"layers": work.create(jax.random.key(0))[0]["layers"]}
        batch = {name: np.random.default_rng(0).normal(size=(16, work.WIDTH)) for name in "xy"}
        args = (params, batch, jax.random.key(1), np.float64(0.1))
        parallel = spmdctx.parallel(
            step, parallel_mode="auto_parallel", pipeline_stages=2, grad_accumulation_step=4, parameter_broadcast=True, topology="cpu"
        )
        got, want = parallel(*args), jax.jit(step)(*args)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12, rtol=1e-12)
        assert (
            "What the step computes before its loss has no plan: XLA splits it on stages 0, 1, where it is read."
            in parallel.plan(*args).notes
        )
        homes = {frozenset(leaf.devices()) for leaf in jax.tree.leaves(got[0])}
        assert sorted(map(len, homes)) == [4, 4]
        assert parallel.verify(*args).ok
        again = parallel(got[0], parallel.shard_batch(batch), *args[2:])
        np.testing.assert_allclose(again[1], jax.jit(step)(want[0], *args[1:])[1], atol=1e-12)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("is_pair", [False, True])
def test_an_optimizer_in_a_conditional_runs_on_each_stage(stages, is_pair):
    """The second step overflows, or slow parameters follow fast ones."""
    optimizer = (
        optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5)
        if is_pair
        else optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)), 2)
    )

    def fn(params, state, batch):
        fast = params.fast if is_pair else params
        value, gradient = spmdctx.value_and_grad(small.loss)(fast, batch)
        update, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, update), state, value

    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda leaf: leaf.astype(float), small.state_of(4, tied=False)[0]), small.batch_of()
        params = optax.LookaheadParams.init_synced(params) if is_pair else params
        args = other = (params, optimizer.init(params))
        parallel = spmdctx.parallel(fn, parallel_mode="auto_parallel", pipeline_stages=stages, grad_accumulation_step=4)
        for size in (1.0, 2.0 if is_pair else float("nan"), 1.0):
            given = {"x": batch["x"] * size, "y": batch["y"]}
            args, other = parallel(*args, given)[:2], jax.jit(fn)(*other, given)[:2]
        for got, want in zip(jax.tree.leaves(args), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12, rtol=1e-12)
