"""What the needed results of a program read, through calls, loops and branches."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from spmdctx.trace.build.jaxprs.liveness import Liveness

ONES = jnp.ones(4)
LIVENESS = Liveness(lambda _eqn: False, lambda _eqn, _needed: None)


def swapped(x, y, z):
    """The third value reaches the first result after two turns."""
    return y + 1, z * 2, jnp.sin(z)


def in_scan(x, y, z):
    return jax.lax.scan(lambda carry, _: (swapped(*carry), None), (x, y, z), None, length=3)[0]


def in_while(x, y, z):
    return jax.lax.while_loop(lambda carry: carry[2][0] < 3, lambda carry: swapped(*carry), (x, y, z))


def in_cond(x, y, z):
    return jax.lax.cond(z[0] > 0, swapped, lambda x, y, z: (x, x, z), x, y, z)


def solved(x, y, z):
    return jax.lax.custom_linear_solve(lambda vector: vector * x, y, lambda _, vector: vector / z), y, z


READS = {
    "jit": (jax.jit(swapped), [{1}, {2}, {2}]),
    "checkpoint": (jax.checkpoint(swapped), [{1}, {2}, {2}]),
    "scan": (in_scan, [{0, 1, 2}, {1, 2}, {2}]),
    "while": (in_while, [{0, 1, 2}, {1, 2}, {2}]),
    "cond": (in_cond, [{0, 1, 2}, {0, 2}, {2}]),
    "linear solve": (solved, [{0, 1, 2}, {1}, {2}]),
}


@pytest.mark.parametrize(("name", "result"), list(itertools.product(READS, range(3))))
def test_a_result_reads_what_it_depends_on(name, result):
    fn, reads = READS[name]
    jaxpr = jax.make_jaxpr(fn)(ONES, ONES, ONES).jaxpr
    _, read = LIVENESS.alive(jaxpr, [place == result for place in range(3)])
    assert {place for place, is_read in enumerate(read) if is_read} == reads[result]


def test_a_carried_value_that_no_turn_reads_is_needed_where_it_starts():
    """Nothing tells that a while loop turns even once."""

    def replaced(x, y):
        return jax.lax.while_loop(lambda carry: carry[1][0] < 3, lambda carry: (carry[1], carry[1] + 1), (x, y))

    jaxpr = jax.make_jaxpr(replaced)(ONES, ONES).jaxpr
    assert LIVENESS.alive(jaxpr, [True, False])[1] == [True, True]
    assert LIVENESS.alive(jaxpr, [False, True])[1] == [False, True]
