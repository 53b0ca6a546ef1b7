"""Operands that calls hand on are found again among the results."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.pipeline.cut.passed import passed_inputs


@jax.jit
def swapped(one, other):
    return other, one, one + other


@jax.checkpoint
def recomputed(one, other):
    made, own, total = swapped(one, other)
    return jnp.sin(total), made, own


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (swapped, [1, 0, None]),
        (recomputed, [None, 1, 0]),
        (lambda one, other: (*recomputed(*swapped(one, other)[:2]), other, 2.0), [None, 0, 1, 1, None]),
    ],
)
def test_results_that_are_operands(function, expected):
    assert passed_inputs(jax.make_jaxpr(function)(1.0, 2.0).jaxpr) == expected
