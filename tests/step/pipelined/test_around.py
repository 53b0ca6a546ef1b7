"""What a step computes before its loss runs on the stages that read it; broadcast state and verify know several groups of devices."""

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx
from tests.processes import work_pipeline as work

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
