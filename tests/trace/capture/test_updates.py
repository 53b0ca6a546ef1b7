"""What a step reads its inputs for is seen through every call, loop and branch."""

import jax
import jax.numpy as jnp
import pytest
from jax.custom_batching import custom_vmap

from spmdctx.trace.capture.updates import Updates

ONES = jnp.ones(4)


def in_custom_jvp(fn):
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: (fn(*primals), fn(*tangents)))
    return wrapped


def in_custom_vmap(fn):
    wrapped = custom_vmap(fn)
    wrapped.def_vmap(lambda _size, _batched, *args: (jax.vmap(fn)(*args), (True, True)))
    return wrapped


def in_scan(fn):
    return lambda x, y: jax.lax.scan(lambda carry, _: (fn(*carry), None), (x, y), None, length=3)[0]


def in_while(fn):
    return lambda x, y: jax.lax.while_loop(lambda carry: carry[0][0] < 9, lambda carry: fn(*carry), (x, y))


def in_cond(fn):
    return lambda x, y: jax.lax.cond(x[0] > 0, fn, lambda x, y: (x, y), x, y)


CALLS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_vmap": in_custom_vmap,
    "custom_jvp": in_custom_jvp,
    "cond": in_cond,
}
LOOPS = {"scan": in_scan, "while": in_while}
WRAPPERS = {**CALLS, **LOOPS}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_leaf_beside_a_parameter_in_a_call_is_not_read_with_it(wrapper):
    prepared = wrapper(lambda weight, moment: (weight * 2, moment + 1))

    def step(weight, moment):
        ready, moment = prepared(weight, moment)
        gradient = jax.grad(lambda own: jnp.sum(own**2))(ready)
        return weight - gradient * moment, moment

    jaxpr = jax.make_jaxpr(step)(ONES, ONES).jaxpr
    updates = Updates(jaxpr, {0: 0, 1: 1})
    assert updates.unread([0, 1]) == {1}
    assert updates.of_others([0, 1]) == {1}


@pytest.mark.parametrize(("wrapper", "unread"), [(CALLS[name], {1}) for name in CALLS] + [(LOOPS[name], set()) for name in LOOPS])
def test_a_function_that_is_differentiated_inside_a_call_is_seen(wrapper, unread):
    """The next turn of a loop reads what this turn makes of the moment."""

    def once(weight, moment):
        return weight - jax.grad(lambda own: jnp.sum(own**2))(weight) * moment, moment * 0.5

    jaxpr = jax.make_jaxpr(wrapper(once))(ONES, ONES).jaxpr
    assert Updates(jaxpr, {0: 0, 1: 1}).unread([0, 1]) == unread


def test_a_step_that_differentiates_nothing_reads_all():
    jaxpr = jax.make_jaxpr(lambda weight, moment: (weight * 2, moment + 1))(ONES, ONES).jaxpr
    assert Updates(jaxpr, {0: 0, 1: 1}).unread([0, 1]) == set()
