"""Operands that calls hand on are found again among the results."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.trace.build.jaxprs.passed import passed_inputs


@jax.jit
def swapped(one, other):
    return other, one, one + other


@jax.checkpoint
def recomputed(one, other):
    made, own, total = swapped(one, other)
    return jnp.sin(total), made, own


def scanned(one, other):
    """The first carry stays, the second changes, rows come back as they are."""
    rows = jnp.broadcast_to(other, (3,))
    (kept, added), (same, twice) = jax.lax.scan(lambda carry, row: ((carry[0], carry[1] + row), (row, 2 * row)), (one, other), rows)
    return kept, added, same, twice


def exchanged(one, other):
    return jax.lax.scan(lambda carry, _: ((carry[1], carry[0]), None), (one, other), length=3)[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (swapped, [1, 0, None]),
        (recomputed, [None, 1, 0]),
        (scanned, [0, None, None, None]),
        (lambda one, other: jax.lax.scan(lambda carry, row: (carry, row), one, jnp.stack([other]))[0], [0]),
        (lambda one, other: jax.lax.scan(lambda carry, row: (carry + row, row), 0.0, one)[1], [0]),
        (exchanged, [None, None]),
        (lambda one, other: (*recomputed(*swapped(one, other)[:2]), other, 2.0), [None, 0, 1, 1, None]),
    ],
)
def test_results_that_are_operands(function, expected):
    one = jnp.ones(3) if expected == [0] and function is not scanned else 1.0
    assert passed_inputs(jax.make_jaxpr(function)(one, 2.0).jaxpr) == expected
