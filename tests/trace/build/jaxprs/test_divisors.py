"""By which numbers a program divides its values, wherever they stand."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.trace.build.jaxprs.divisors import divisors, divisors_in

X = jnp.ones(4)


def found(fn):
    equations = jax.make_jaxpr(fn)(X).eqns
    return divisors([None, *equations], [0, *range(1, len(equations) + 1)])


@pytest.mark.parametrize(
    ("fn", "divisor"),
    [
        (lambda x: x / 32, 32),
        (lambda x: x / -32.0, 32),
        (lambda x: x * 0.125, 8),
        (lambda x: 0.125 * x, 8),
        (lambda x: x * 3, 1),
        (lambda x: x / 0.5, 1),
    ],
)
def test_a_number_divides_from_either_side(fn, divisor):
    assert found(fn) == {1: pytest.approx(divisor)}


@pytest.mark.parametrize("fn", [lambda x: 32 / x, lambda x: x / x, lambda x: x + 32, lambda x: x * 0.0, lambda x: x / jnp.inf])
def test_where_no_number_divides_nothing_is_said(fn):
    assert found(fn) == {}


def test_dead_sites_have_no_divisor():
    equations = jax.make_jaxpr(lambda x: (x / 2, x / 4))(X).eqns
    assert divisors(equations, [-1, 0]) == {0: 4}


def test_bodies_are_looked_into():
    def fn(x):
        x = jax.lax.fori_loop(0, 3, lambda _, x: x / 5, x)
        return jax.lax.cond(x[0] > 0, lambda x: x * 0.5, lambda x: x / 1, x)

    assert divisors_in(jax.make_jaxpr(fn)(X).jaxpr) == (2, 5)
