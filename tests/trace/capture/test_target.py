"""Functions that are no step for one device are refused by name."""

import functools

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.errors import UnsupportedError


def step(w, x):
    return w - jax.lax.pmean(x.mean(0), "i")


@pytest.mark.parametrize("given", [jax.pmap(step, axis_name="i"), functools.partial(jax.pmap)(step, "i")])
def test_a_function_of_pmap_is_refused_before_it_is_traced(given):
    with pytest.raises(UnsupportedError, match=r"jax\.pmap\(step\)"):
        spmdctx.parallel(given, parallel_mode="data_parallel").plan(jnp.ones(3), jnp.ones((8, 3)))


def test_the_function_below_pmap_is_a_step():
    below = jax.pmap(lambda w, x: w - x.mean(0)).__wrapped__
    assert spmdctx.plan(below, jnp.ones(3), jnp.ones((8, 3)), parallel_mode="data_parallel", device_num=8).mesh == {"data": 8}
