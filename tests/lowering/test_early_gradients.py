"""A backward pass on GPU makes the gradients of recomputed layers before it goes on, and so needs the memory that its plan says."""

from functools import partial

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.audit import peak_bytes
from spmdctx.lowering.rewrite.waiting.early_gradients import with_early_gradients
from tests.audit.compile_only import need_gpu
from tests.pipeline.losses import decoder
from tests.pipeline.losses import loss as decoder_loss

WIDTH, LAYERS = 16, 4


def layer(own, x):
    return x + jnp.tanh(x @ own["up"]) @ own["down"]


def loss(params, x, *, remat=True):
    one = jax.checkpoint(layer) if remat else layer
    for own in params:
        x = one(own, x)
    return (x * x).mean()


def params_of(width, count=LAYERS):
    keys = jax.random.split(jax.random.key(0), count)
    shapes = {"up": (width, 2 * width), "down": (2 * width, width)}
    return [{name: jax.random.normal(key, shape) / width**0.5 for name, shape in shapes.items()} for key in keys]


def pipelined_step(params, batch):
    gradients = spmdctx.grad(partial(decoder_loss, remat=True))(params, batch)
    return jax.tree.map(lambda own, gradient: own - 0.1 * gradient, params, gradients)


def written(function, *args, is_split=False):
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    flat = jexc.jaxpr_as_fun(with_early_gradients(closed, is_split=is_split))(*jax.tree.leaves(args))
    return closed, jax.tree.unflatten(jax.tree.structure(shapes), flat)


def barriers(closed, *, is_split):
    eqns = with_early_gradients(closed, is_split=is_split).jaxpr.eqns
    return [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]


def stacked_loss(params, x):
    """The scan runs a pair of recomputed layers in each iteration."""
    both = jax.tree.map(lambda *own: jnp.stack(own), *params)
    pairs = jax.tree.map(lambda own: own.reshape(LAYERS // 2, 2, *own.shape[1:]), both)

    def body(x, pair):
        for number in range(2):
            x = jax.checkpoint(layer)(jax.tree.map(lambda own, at=number: own[at], pair), x)
        return x, None

    return (jax.lax.scan(body, x, pairs)[0] ** 2).mean()


def shared_loss(params, x):
    """All layers have the same weights, whose gradients are added up on the way."""
    return loss([params[0]] * LAYERS, x)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("own", [loss, stacked_loss, shared_loss])
def test_the_numbers_are_the_same(own, is_split):
    args = params_of(WIDTH), jnp.linspace(-1.0, 1.0, 8 * WIDTH).reshape(8, WIDTH)
    _, found = written(jax.value_and_grad(own), *args, is_split=is_split)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), found, jax.value_and_grad(own)(*args))


def test_what_is_left_of_the_pass_waits_for_the_gradients_of_a_layer():
    closed = jax.make_jaxpr(jax.grad(loss))(params_of(WIDTH), jnp.ones((8, WIDTH)))
    found = barriers(closed, is_split=False)
    assert len(found) == LAYERS - 1
    assert [len(eqn.invars) for eqn in found] == [3] * (LAYERS - 1)


def test_half_of_the_gradients_may_be_reduced_during_the_next_layer():
    closed = jax.make_jaxpr(jax.grad(loss))(params_of(WIDTH), jnp.ones((8, WIDTH)))
    found = barriers(closed, is_split=True)
    # The weight down of the own layer, made first, and the weight up of the layer before, made last.
    shapes = [[var.aval.shape for var in eqn.invars] for eqn in found]
    assert shapes == [[(8, WIDTH), (2 * WIDTH, WIDTH)], *[[(8, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)]] * (LAYERS - 2)]


def test_programs_without_recomputed_layers_stay_the_objects_that_they_are():
    args = params_of(WIDTH), jnp.ones((8, WIDTH))
    for function in (jax.grad(lambda params, x: loss(params, x, remat=False)), loss):
        closed = jax.make_jaxpr(function)(*args)
        assert with_early_gradients(closed, is_split=False) is closed


def plain_step(params, x):
    gradients = spmdctx.grad(loss)(params, x)
    return jax.tree.map(lambda own, gradient: own - 0.1 * gradient, params, gradients)


def test_the_compiled_peak_on_gpu_is_the_planned_one():
    run = spmdctx.parallel(plain_step, devices=need_gpu(), parallel_mode="data_parallel", donate_argnums=0)
    args = jax.eval_shape(lambda: (params_of(512, 8), jnp.zeros((2**17, 512))))
    assert run.plan(*args).cost.memory_bytes == pytest.approx(peak_bytes(run.lower(*args).compile()), rel=0.15)


def test_the_compiled_peak_of_a_stage_on_gpu_is_the_planned_one():
    options = {"parallel_mode": "auto_parallel", "pipeline_stages": 2, "grad_accumulation_step": 2, "donate_argnums": 0}
    run = spmdctx.parallel(pipelined_step, devices=need_gpu(4), **options)
    args = jax.eval_shape(lambda: (decoder(jax.random.key(0), 4, tied=False, times=16), (jnp.zeros((64, 256), int),) * 2))
    lowered = run.lower(*args)
    for name, stage in zip(("backward0", "backward1"), run.plan(*args).stages, strict=True):
        compiled = lowered[name].compile()
        beside = stage.live_bytes[name] - compiled.memory_analysis().argument_size_in_bytes
        assert stage.memory_bytes == pytest.approx(beside + peak_bytes(compiled), rel=0.13)
