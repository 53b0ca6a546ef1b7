"""Donated state of a pipeline is reused after the loss: right numbers, no warning, and no use of deleted arrays."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx import DonationError
from tests.step.pipelined import small
from tests.step.pipelined.small import parallel, state_of
from tests.step.pipelined.test_entry import assert_close

BATCH = small.batch_of()


def test_donated_state_is_reused_and_the_numbers_are_one_device_s():
    step, state, want = parallel(donate_argnums=(0, 1)), state_of(4, tied=False), state_of(4, tied=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in range(3):
            before = [leaf for leaf in jax.tree.leaves(state) if leaf.size > 1]
            *state, loss = step(*state, BATCH)
            *want, wanted = jax.jit(small.step)(*want, BATCH)
            assert call == 0 or all(leaf.is_deleted() for leaf in before)
    assert_close((state, loss), (want, wanted), 1e-4)
    assert not any("not reused" in note for note in step.plan(*state, BATCH).notes)
    memory = step.lower(*state, BATCH).compile().memory_analysis()
    assert all(memory[name].alias_size_in_bytes > 0.9 * memory[name].output_size_in_bytes for name in ("after1_0", "after1_1"))


def test_the_plan_counts_what_is_reused():
    kept, reused = (parallel(**options).plan(*state_of(4, tied=False), BATCH) for options in ({}, {"donate_argnums": (0, 1)}))
    for own, other in zip(kept.stages, reused.stages, strict=True):
        assert own.after.keys() == other.after.keys()
        assert any(own.after[name].cost.memory_bytes > 1.3 * other.after[name].cost.memory_bytes for name in own.after)


def test_state_used_again_after_it_was_donated_is_named():
    step = parallel(donate_argnums=(0, 1))
    first = step(*state_of(), BATCH)[:2]
    second = step(*first, BATCH)[:2]
    with pytest.raises(DonationError, match=r"params/first(.|\n)*fix: "):
        step(*first, BATCH)
    third = step(*second, BATCH)[:2]
    with pytest.raises(DonationError, match="params/first"):
        step({**third[0], "first": second[0]["first"]}, third[1], BATCH)
    assert np.isfinite(step(*third, BATCH)[2])


def test_one_array_in_two_donated_places_is_copied():
    step, (params, state) = parallel(donate_argnums=(0, 1)), state_of()
    params, state = step(params, state, BATCH)[:2]
    params["layers"][1] = params["layers"][0]
    want = jax.jit(small.step)(*jax.tree.map(np.asarray, (params, state)), BATCH)
    assert_close(step(params, state, BATCH), want, 1e-4)
    assert any("shares its memory with" in note for note in step.notes)


def test_what_is_not_donated_or_not_renewed_after_the_loss_stays():
    def step(params, momentum, target, batch):
        loss, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(small.loss, micro_size=4))(params, batch)
        momentum = jax.tree.map(lambda old, new: 0.9 * old + new, momentum, gradient)
        new = jax.tree.map(lambda own, own_momentum, far: own - 0.1 * own_momentum - 0.01 * (own - far), params, momentum, target)
        return new, momentum, target, loss

    step_of = spmdctx.parallel(step, parallel_mode="semi_auto_parallel", pipeline_stages=2, donate_argnums=(1, 2))
    params, _ = state_of()
    args = [params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.ones_like, params)]
    want = jax.tree.map(jnp.copy, args)
    for _ in range(3):
        kept = args[0]
        *args, loss = step_of(*args, BATCH)
        *want, wanted = jax.jit(step)(*want, BATCH)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))
    assert_close((args, loss), (want, wanted), 1e-4)
    assert any("is not reused" in note for note in step_of.plan(*args, BATCH).notes)


def test_verify_keeps_donated_arrays():
    step, (params, state) = parallel(donate_argnums=(0, 1)), state_of()
    params, state = step(params, state, BATCH)[:2]
    assert step.verify(params, state, BATCH).ok
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))


def test_objects_that_are_renewed_keep_no_deleted_array():
    def step(model, optimizer, x):
        loss, gradient = spmdctx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(seed)) for seed in range(2)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    train = spmdctx.parallel(step, parallel_mode="auto_parallel", grad_accumulation_step=4, pipeline_stages=2)
    found = [float(train(model, optimizer, jnp.ones((32, 16)))) for _ in range(3)]
    assert found[2] < found[0]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state((model, optimizer))))
