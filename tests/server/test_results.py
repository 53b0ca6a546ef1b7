"""Results besides the state are small, or refused by name before anything is started."""

import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.errors import UnsupportedError
from tests.server.cases import served


def step_with(size):
    def step(params, x):
        def loss(params):
            return jnp.mean((x @ params) ** 2)

        value, grads = spmdctx.value_and_grad(loss)(params)
        return params - grads, {"loss": value, "all": jnp.broadcast_to(value, (size,))}

    return step


def planned(size):
    step = served(step_with(size), 2, 2)
    return step.plan(jnp.ones(8), jnp.ones((4, 8)))


def test_large_results_are_refused_by_name():
    with pytest.raises(UnsupportedError) as caught:
        planned(1 << 19)
    assert "out/1/all: 2.00 MiB" in str(caught.value)
    assert "at most 1.00 MiB" in str(caught.value)


def test_small_results_are_not():
    assert planned(1 << 15) is not None
