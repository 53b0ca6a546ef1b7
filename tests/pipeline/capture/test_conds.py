"""A conditional over many arrays is several ones of few arrays, with the same results."""

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx.pipeline.capture.conds import divided


def of_leaves(flag, a, b, count):
    """Each result has operands of its own; the count is a scalar that both results of arrays read."""

    def renewed(a, b, count):
        count = count + 1
        return jnp.tanh(a) * count, b * count, count

    return jax.lax.cond(flag, renewed, lambda a, b, count: (a, b, count), a, b, count)


def of_a_norm(flag, a, b, count):
    """Only the norm of all arrays holds them together: it is computed in any case."""

    def clipped(a, b):
        norm = jnp.sqrt(jnp.sum(a * a) + jnp.sum(b * b))
        return a / norm, b / norm

    return *jax.lax.cond(flag, clipped, lambda a, b: (a, b), a, b), count


def of_a_loop(flag, a, b, count):
    """The loop would not end where its branch is not taken."""

    def halved(a, b):
        norm = jax.lax.while_loop(lambda own: own > 1.0, lambda own: own / 2, jnp.sum(a * a) + jnp.sum(b * b))
        return a / norm, b / norm

    return *jax.lax.cond(flag, halved, lambda a, b: (a, b), a, b), count


def swapped(number, a, b, count):
    """In one branch of three, results depend on each other's operand; so does a jit inside."""
    return *jax.lax.switch(number + 1, [lambda a, b: (b, a), jax.jit(lambda a, b: (a + 1, b)), lambda a, b: (a, b)], a, b), count


def constant(flag, a, b, count):
    """Some results are literals, or the operands themselves."""
    return jax.lax.cond(flag, lambda a, b: (a, jnp.zeros(3), 1.0), lambda a, b: (a * 2, b, 2.0), a, b)


@pytest.mark.parametrize(("fn", "groups"), [(of_leaves, 3), (of_a_norm, 0), (of_a_loop, 1), (swapped, 2), (constant, 3)])
@pytest.mark.parametrize("flag", [True, False])
def test_parts_give_the_results_of_the_whole(fn, groups, flag):
    args = (jnp.asarray(flag), jnp.arange(3.0) + 1, jnp.arange(3.0) - 4, jnp.float32(2))
    closed = jax.make_jaxpr(fn)(*args)
    parts, num_selected = divided(closed.jaxpr.eqns)
    assert num_selected == (groups == 0)
    assert sum(eqn.primitive.name == "cond" for eqn in parts) == groups
    got = jexc.jaxpr_as_fun(jexc.ClosedJaxpr(closed.jaxpr.replace(eqns=parts), closed.consts))(*args)
    for one, other in zip(got, fn(*args), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_branch_with_an_effect_stays_whole():
    def fn(flag, a, b):
        def shown(a, b):
            jax.debug.print("{}", a[0])
            return a + 1, b + 1

        return jax.lax.cond(flag, shown, lambda a, b: (a, b), a, b)

    eqns = jax.make_jaxpr(fn)(True, jnp.ones(3), jnp.ones(3)).jaxpr.eqns
    assert divided(eqns) == (list(eqns), 0)
