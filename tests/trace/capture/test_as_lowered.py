"""Loops whose elements end one by one: the program and the plan say that devices ask each other whether one goes on."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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


ONE_AXIS, TWO_DEVICES = (Mesh(np.array(jax.devices()[:count]), ("data",)) for count in (8, 2))


def put(mesh, *spec, **options):
    sharding = NamedSharding(mesh, P(*spec), **options)
    return lambda x: jax.device_put(x, sharding)


MOVED = {
    "plain": lambda move, x: move(x * 2),
    "jit": lambda move, x: jax.jit(move)(x * 2),
    "scan": lambda move, x: jax.lax.scan(lambda c, _: (move(c) * 2, None), x, None, length=2)[0],
    "grad": lambda move, x: jax.grad(lambda x: jnp.sum(jnp.sin(move(x * 2))))(x),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_device_put_to_another_mesh_is_refused_like_a_constraint(name):
    step = spmdctx.parallel(lambda x: MOVED[name](put(TWO_DEVICES, "data"), x), device_num=8, parallel_mode="auto_parallel")
    with pytest.raises(spmdctx.StrategyError, match="names mesh axes that the step's mesh does not have") as caught:
        step(X)
    assert "{'data': 2}" in str(caught.value)


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_a_device_put_to_the_steps_mesh_is_planned_as_a_constraint(name, mode):
    moving, constraining = (
        spmdctx.parallel(lambda x, move=move: jnp.sum(MOVED[name](move, x)), mesh={"data": 8}, parallel_mode=mode)
        for move in (put(ONE_AXIS, "data"), lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(ONE_AXIS, P("data"))))
    )
    moved, constrained = ([replace(one, source="") for one in step.plan(X).collectives] for step in (moving, constraining))
    assert moved == constrained
    assert moving.audit(X).ok
    np.testing.assert_allclose(moving(X), jnp.sum(MOVED[name](lambda x: x, X)), rtol=1e-5)


def test_of_several_values_each_is_put_where_its_own_place_says():
    def step(x):
        split, free = jax.device_put((x * 2, x * 3), (NamedSharding(ONE_AXIS, P("data")), None))
        return split, free

    jaxpr = as_lowered(jax.make_jaxpr(step)(X))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["mul", "mul", "sharding_constraint", "device_put"]
    for got, want in zip(spmdctx.parallel(step, mesh={"data": 8}, parallel_mode="semi_auto_parallel")(X), (X * 2, X * 3), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_move_to_the_memory_of_the_host_stays_one():
    jaxpr = as_lowered(jax.make_jaxpr(put(ONE_AXIS, "data", memory_kind="pinned_host"))(X))
    constraint, move = jaxpr.eqns
    assert constraint.params["sharding"].spec == P("data")
    assert move.params["devices"] == (jax.memory.Space.Host,)


@pytest.mark.parametrize("mode", ["recursive_programming", "dynamic_programming", None])
def test_a_scan_of_no_iterations_gives_its_first_state_and_empty_stacks(mode):
    nothing = jnp.zeros((0, 16, 8))

    def step(x, key):
        def inner(state):
            return jax.lax.scan(lambda c, a: (c * a, c), state, nothing)[0] + 1

        outer, stack = jax.lax.scan(lambda c, a: (c * a, (c.sum(), key)), x, nothing)
        return (*jax.lax.scan(lambda c, _: (inner(c), c[0]), outer, None, length=3), *stack)

    x, key = jnp.arange(128.0).reshape(16, 8), jax.random.key(0)
    how = {"parallel_mode": "auto_parallel", "search_mode": mode} if mode else {"parallel_mode": "data_parallel"}
    planned = spmdctx.parallel(step, device_num=8, **how)
    for got, wanted in zip(planned(x, key)[:3], step(x, key)[:3], strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert planned(x, key)[3].shape == (0,)
    assert planned.audit(x, key).ok
