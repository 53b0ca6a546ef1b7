"""Memory of local losses: weights that are gathered for one are there while it reads them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.machine.presets import topology

LAYERS, WIDTH, BATCH, DEVICES = 12, 256, 32, 8
WEIGHT = WIDTH * WIDTH * 4
SPLIT = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"optimizer_level": "level3", "parallel_optimizer_threshold": 1}}


def peak(cast=lambda weight: weight, trained=LAYERS, **options):
    """The planned peak of a step of gradient descent with so many of the first weights, in whole weights."""

    def loss(first, others, x):
        for weight in (*first, *others):
            x = jnp.tanh(x @ cast(weight))
        return jnp.mean(x**2)

    def step(weights, x):
        first, others = weights[:trained], weights[trained:]
        return [weight - 0.1 * gradient for weight, gradient in zip(first, spmdctx.grad(loss)(first, others, x), strict=True)] + others

    split = spmdctx.parallel(step, parallel_mode="data_parallel", device_num=DEVICES, donate_argnums=0, **SPLIT, **options)
    plan = split.plan([jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
    return plan.cost.memory_bytes / WEIGHT


def test_no_weight_is_there_beside_its_gradient_for_the_whole_backward_pass():
    stored = LAYERS / DEVICES
    assert stored + LAYERS < peak() < stored + LAYERS + 4, "with each gradient that is made a weight is done with"


@pytest.mark.parametrize("device", ["tpu-v5p", "h100"])
def test_weights_that_are_read_narrow_are_kept_so(device):
    """They are gathered so, or what products read of them is in memory, and they are not."""
    machine = dataclasses.replace(topology(device), scratch_bytes=0)
    assert peak(lambda weight: weight.astype(jnp.bfloat16), trained=1, topology=machine) < 0.7 * peak(trained=1, topology=machine)
