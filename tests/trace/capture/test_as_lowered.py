"""Loops whose elements end one by one: the program and the plan say that devices ask each other whether one goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.trace.capture.as_lowered import as_lowered

X = jnp.linspace(0.1, 3.0, 64).reshape(16, 4)


def halved(row):
    return jax.lax.while_loop(lambda row: jnp.sum(row) > 1, lambda row: row * 0.5, row)


def counted(row):
    """A loop that starts from constants, tests with a value of its own, and holds a key."""
    limit = row[0]
    start = jax.random.key(3), 0, row

    def turn(state):
        key, count, row = state
        return jax.random.fold_in(key, count), count + 1, row + jax.random.uniform(key, row.shape)

    key, count, row = jax.lax.while_loop(lambda state: state[1] < limit, turn, start)
    return count, jnp.where(count > 1, row, -row), jax.random.key_data(key)


def nested(row):
    def turn(state):
        count, row = state
        return count + 1, jax.vmap(lambda own: jax.lax.while_loop(lambda own: own > 1, lambda own: own * 0.7, own))(row) * 1.5

    return jax.lax.while_loop(lambda state: (jnp.max(state[1]) > 0.5) & (state[0] < 3), turn, (0, row))[1]


@jax.custom_jvp
def with_rule(x):
    return jax.vmap(halved)(x)


with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), tangents[0]))

LOOPS = {
    "vmap": jax.vmap(halved),
    "two vmaps": lambda x: jax.vmap(jax.vmap(halved))(x.reshape(16, 2, 2)),
    "states of several types": jax.vmap(counted),
    "loop in a loop": jax.vmap(nested),
    "in a scan": lambda x: jax.lax.scan(lambda own, _: (jax.vmap(halved)(own) * 4, None), x, None, length=2)[0],
    "in a branch": lambda x: jax.lax.cond(x[0, 0] > 1, jnp.sin, jax.vmap(halved), x),
    "behind a rule for derivatives": with_rule,
    "one predicate": lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x * 0.5, x),
    "gamma": lambda x: jax.random.gamma(jax.random.key(1), x[:, :2]),
}

LOCAL = {
    "incomplete beta": lambda x: jax.scipy.special.betainc(x, x + 1, x / 4),
    "incomplete gammas": lambda x: jax.scipy.special.gammainc(x, x) + jax.scipy.special.gammaincc(x, 2.0),
    "derivative of an incomplete gamma": jax.grad(lambda x: jnp.sum(jax.scipy.special.gammainc(x, 2.0))),
}


def planned(function):
    step = spmdctx.parallel(lambda x, scale: (function(x), scale * 2), parallel_mode="data_parallel", batch_argnums=0)
    plan = step.plan(X, jnp.float32(1.0))
    assert next(one for one in plan.inputs if one.path == "x").sharding == (("data",), ())
    return step, plan


def assert_same(step, function):
    want, got = jax.device_get((jax.jit(function)(X), step(X, jnp.float32(1.0))[0]))
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, rtol=2e-5), got, want)


@pytest.mark.parametrize("name", LOOPS)
def test_the_plan_counts_what_devices_ask_each_other_in_every_iteration(name):
    step, plan = planned(LOOPS[name])
    assert any(one.kind == "all_reduce" and one.payload_bytes <= 4 for one in plan.collectives)
    report = step.audit(X, jnp.float32(1.0))
    assert report.ok, str(report)
    assert (report.missing, report.unplanned) == ((), ()), str(report)
    assert_same(step, LOOPS[name])


@pytest.mark.parametrize("name", LOCAL)
def test_elementwise_functions_that_iterate_ask_no_other_device(name):
    step, plan = planned(LOCAL[name])
    report = step.audit(X, jnp.float32(1.0))
    assert (plan.collectives, report.compiled_bytes) == ((), 0), str(report)
    assert_same(step, LOCAL[name])


def test_a_program_without_such_loops_is_not_touched():
    jaxpr = jax.make_jaxpr(lambda x: LOOPS["one predicate"](jnp.sin(x)) @ jax.random.normal(jax.random.key(0), (4, 4)))(X)
    assert as_lowered(jaxpr) is jaxpr
