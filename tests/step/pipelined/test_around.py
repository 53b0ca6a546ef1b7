"""What a step computes before its loss runs on the stages that read it; broadcast state and verify know several groups of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
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
        notes = parallel.plan(*args, batch).notes
        assert any("All branches of 1 conditional after the loss are computed" in note for note in notes) == (not is_pair)
        for got, want in zip(jax.tree.leaves(args), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12, rtol=1e-12)


def with_a_teacher(params, teacher, batch):
    """The teacher runs behind the student, so that its layers lie on other stages than the student's."""

    def loss(params, teacher, batch):
        taught = jax.lax.stop_gradient(run(teacher, batch["x"]))
        return jnp.mean((run(params, batch["x"]) - taught) ** 2)

    def run(layers, x):
        for layer in layers:
            x = x + jnp.tanh(x @ layer)
        return x

    value, gradient = spmdctx.value_and_grad(loss)(params, teacher, batch)
    params = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, gradient)
    return params, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, teacher, params), value


def with_muon(params, state, batch):
    """All updates read one small array of coefficients."""

    def loss(params, batch):
        x = batch["x"]
        for layer in params:
            x = x + jnp.tanh(x @ layer)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradient = spmdctx.value_and_grad(loss)(params, batch)
    update, state = MUON.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value


def with_sums_over_layers(params, momenta, batch):
    """Each layer is renewed by its own gradient and by that of the layer at the other end."""
    new, _, value = with_a_teacher(params, params, batch)
    moved = [old - other for old, other in zip(params, reversed(new), strict=True)]
    momenta = [0.5 * momentum + move for momentum, move in zip(momenta, moved, strict=True)]
    return [leaf - 0.01 * momentum for leaf, momentum in zip(params, momenta, strict=True)], momenta, value + jnp.vdot(*moved[:2])


MUON = optax.contrib.muon(0.01)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("fn", [with_a_teacher, with_muon, with_sums_over_layers])
def test_arrays_that_are_combined_after_the_loss_cross(fn, stages):
    with jax.enable_x64(True):
        params, other = ([jax.random.normal(jax.random.key(seed + one), (16, 16)) / 4 for one in range(4)] for seed in (0, 9))
        args = want = (params, MUON.init(params) if fn is with_muon else other)
        batch = jax.tree.map(lambda leaf: leaf.astype(float), small.batch_of())
        parallel = spmdctx.parallel(
            fn, parallel_mode="auto_parallel", pipeline_stages=stages, grad_accumulation_step=4, donate_argnums=(0, 1)
        )
        plan = parallel.plan(*args, batch)
        assert sum("cross in each step" in note for note in plan.notes) == 1
        args, want = jax.tree.map(jnp.copy, args), jax.tree.map(jnp.copy, want)
        for _ in range(3):
            *args, value = parallel(*args, batch)
            *want, wanted = jax.jit(fn)(*want, batch)
        for one, other in zip(jax.tree.leaves((args, value)), jax.tree.leaves((want, wanted)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12, rtol=1e-10)
        assert parallel.audit(*args, batch).ok
