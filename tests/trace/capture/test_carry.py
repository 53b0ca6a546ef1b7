"""What a loss makes of its data alone is no next value of it; state that meets the batch is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.ir.graph import Role
from tests.trace.capture.test_capture import capture, roles

W = [jax.random.normal(jax.random.key(number), (8, 8)) / 3 for number in range(2)]
X, Y, H = (jax.random.normal(jax.random.key(number), (16, 8)) for number in (5, 6, 7))


def residual(params, x, y):
    for own in params:
        x = x + jnp.tanh(x @ own)
    return jnp.mean((x - y) ** 2), x


def gated(params, h, x):
    gate = jax.nn.sigmoid(x @ params[0] + h @ params[1])
    h = (1 - gate) * h + gate * jnp.tanh(x @ params[0])
    return jnp.mean(h**2), h


def stepped(loss, differentiate=jax.value_and_grad):
    def step(params, *data):
        (value, aux), gradients = differentiate(loss, has_aux=True)(params, *data)
        return jax.tree.map(lambda own, gradient: own - 0.1 * gradient, params, gradients), aux, value

    return step


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint])
def test_the_prediction_of_a_residual_network_is_no_next_value_of_what_it_reads(wrap):
    captured = capture(stepped(wrap(residual)), (W, X, Y))
    assert captured.carried == ((0, 0), (1, 1))
    assert list(roles(captured).values())[-2:] == [Role.BATCH, Role.BATCH]


def test_a_hidden_state_that_meets_the_batch_is_carried():
    captured = capture(stepped(gated), (W, H, X))
    assert captured.carried == ((0, 0), (1, 1), (2, 2))
    assert list(roles(captured).values())[-1] is Role.BATCH


@pytest.mark.parametrize(("loss", "data"), [(residual, (X, Y)), (gated, (H, X))])
@pytest.mark.parametrize("options", [{"parallel_mode": "data_parallel", "gradients_mean": True}, {"parallel_mode": "auto_parallel"}])
def test_both_give_the_numbers_of_one_device(loss, data, options):
    def step(params, *data):
        return stepped(loss, spmdctx.value_and_grad)(params, *data)

    got = spmdctx.parallel(step, **options)(W, *data)
    for ours, want in zip(jax.tree.leaves(got), jax.tree.leaves(stepped(loss)(W, *data)), strict=True):
        np.testing.assert_allclose(ours, want, rtol=2e-5, atol=1e-5)
