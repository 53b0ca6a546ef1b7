"""Functions that are no step for one device, and options that contradict each other, are refused by name when a step is made."""

import functools

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.errors import ContextError, UnsupportedError


def step(w, x):
    return w - jax.lax.pmean(x.mean(0), "i")


@pytest.mark.parametrize("given", [jax.pmap(step, axis_name="i"), functools.partial(jax.pmap)(step, "i")])
def test_a_function_of_pmap_is_refused_before_it_is_traced(given):
    with pytest.raises(UnsupportedError, match=r"jax\.pmap\(step\)"):
        spmdctx.parallel(given, parallel_mode="data_parallel").plan(jnp.ones(3), jnp.ones((8, 3)))


def test_the_function_below_pmap_is_a_step():
    below = jax.pmap(lambda w, x: w - x.mean(0)).__wrapped__
    assert spmdctx.plan(below, jnp.ones(3), jnp.ones((8, 3)), parallel_mode="data_parallel", device_num=8).mesh == {"data": 8}


@pytest.mark.parametrize(
    ("function", "options", "names"),
    [
        (step, {"static_argnums": 1, "donate_argnums": (0, 1)}, "x"),
        (step, {"static_argnums": -1, "donate_argnames": "x"}, "x"),
        (jax.jit(step, donate_argnums=1), {"static_argnames": "x"}, "x"),
        (jax.jit(step, static_argnums=0), {"donate_argnums": 0}, "w"),
        (lambda *rest: rest[0], {"static_argnums": 2, "donate_argnums": 2}, "rest/2"),
        (lambda w, *, size: w * size, {"static_argnames": "size", "donate_argnames": "size"}, "size"),
        (step, {"static_argnums": (0, 1), "batch_argnames": ("x", "w")}, "w, x"),
    ],
)
def test_a_static_argument_that_is_donated_or_batch_is_refused_when_the_step_is_made(function, options, names):
    with pytest.raises(ContextError, match=rf"are static(.|\n)*got: +{names}\n"):
        spmdctx.parallel(function, **options)


def test_arguments_without_a_name_in_both_options_are_taken():
    spmdctx.parallel(lambda w, x, *, size: w * x * size, static_argnames="size", donate_argnums=0, batch_argnums=1)
