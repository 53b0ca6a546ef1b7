"""Warnings name the user's own line, however deep in the library they arise."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest

import spmdctx

W, X = jnp.eye(4), jnp.ones((16, 4))


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def plain(w, x):
    return jax.grad(loss)(w, x)


def local(w, x):
    return spmdctx.grad(loss)(w, x)


def sharded(w, x):
    return spmdctx.shard(jnp.matmul, in_strategy=((8, 1), (1, 1)))(x, w)  # the line of the strategy


@spmdctx.auto_parallel_context(parallel_mode="data_parallel")
def in_a_context(w, x):
    return spmdctx.parallel(local)(w, x)  # the line of the call


CALLS = {
    "a step": lambda: spmdctx.parallel(local, parallel_mode="data_parallel")(W, X),
    "a step in a class": lambda: spmdctx.AutoParallel(plain, grad_accumulation_step=2)(W, X),
    "an option of a class": lambda: spmdctx.AutoParallel(plain, gradients_mean=True)(W, X),
    "a step in jit": lambda: jax.jit(spmdctx.parallel(local, parallel_mode="data_parallel"))(W, X),
    "a plan": lambda: spmdctx.plan(plain, W, X, parallel_mode="data_parallel", grad_accumulation_step=2),
    "a strategy": lambda: spmdctx.plan(sharded, W, X, parallel_mode="data_parallel"),
    "a context": lambda: in_a_context(W, X),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_warning_names_the_line_of_the_user(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[call]()
    line = {"a strategy": "# the line of the strategy", "a context": "# the line of the call"}.get(call, f'"{call}": lambda')
    (place,) = [number for number, text in enumerate(inspect.getsource(inspect.getmodule(plain)).splitlines(), 1) if line in text][:1]
    assert {(one.filename, one.lineno) for one in caught} == {(__file__, place)}
