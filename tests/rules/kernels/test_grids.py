"""Which grid axes of a kernel devices can share, and what its operations are."""

import operator
from functools import partial

import jax
import numpy as np
import pytest

from spmdctx.rules import rule_for
from spmdctx.rules.kernels.grids import kernel_flops, shared_axes
from tests.rules import kernel_programs as kernels

HEADS = ((2, 8, 4, 16), (2, 4, 4, 16), (2, 4, 4, 16))
FLOPS = {"flops": 3000, "transcendentals": 5, "bytes_accessed": 7}


def arrays(*shapes):
    return [np.ones(shape, np.float32) if isinstance(shape, tuple) else shape for shape in shapes]


def kernel_of(function, *shapes):
    (eqn,) = [eqn for eqn in jax.make_jaxpr(function)(*arrays(*shapes)).eqns if eqn.primitive.name == "pallas_call"]
    return eqn


def shared(function, *shapes):
    return [(own.axis, own.parts) for own in shared_axes(kernel_of(function, *shapes).params)]


@pytest.mark.parametrize(
    ("function", "shapes", "axes"),
    [
        (kernels.scaled, ((8, 4), (4,)), [(0, 4)]),
        (kernels.transposed, ((8, 8),), [(0, 4), (1, 2)]),
        (kernels.attention, HEADS, [(0, 2), (1, 4), (2, 2)]),
        (partial(kernels.attention, divide=operator.floordiv), HEADS, [(0, 2), (1, 4), (2, 2)]),
        (partial(kernels.attention, causal=True), HEADS, [(0, 2), (1, 4)]),
        (kernels.summed, ((4, 8, 3),), [(0, 4), (1, 4)]),
        (partial(kernels.summed, order=(1, 0, 2)), ((4, 8, 3),), [(0, 4), (1, 4)]),
        (kernels.in_place, ((8, 4),), [(0, 8)]),
        (jax.vmap(kernels.numbered), ((4, 8, 2),), [(0, 4)]),
        (jax.vmap(jax.vmap(kernels.scaled, (0, None)), (None, 0)), ((3, 4, 4), (5, 4)), [(0, 5), (1, 3), (2, 2)]),
    ],
)
def test_axes_of_independent_blocks_are_shared(function, shapes, axes):
    assert shared(function, *shapes) == axes


@pytest.mark.parametrize(
    ("function", "shapes", "axes"),
    [
        (kernels.numbered, ((8, 4),), []),
        (kernels.reversed_rows, ((8, 4),), []),
        (kernels.added_up, ((8, 4),), []),
        (partial(kernels.summed, order=(2, 0, 1)), ((4, 8, 3),), []),
        (partial(kernels.summed, order=(0, 2, 1)), ((4, 8, 3),), [(0, 4)]),
        (kernels.looked_up, (np.array([2, 0, 1], np.int32), (3, 8)), [(1, 2)]),
        (lambda x: kernels.scaled(x, x[0]), ((2, 4),), []),
    ],
)
def test_axes_of_dependent_steps_stay_whole(function, shapes, axes):
    assert shared(function, *shapes) == axes


def test_a_group_of_query_heads_stays_with_its_key_head():
    eqn = kernel_of(kernels.attention, *HEADS)
    query, key, value, out = (*(var.aval.shape for var in eqn.invars), eqn.outvars[0].aval.shape)
    rule = rule_for("pallas_call", (query, key, value), (out,), eqn.params)
    assert str(rule) == (
        "([i, (j l), (k m), 1], [i, j, 1, 1], [i, j, 1, 1])->([i, (j n), (k o), 1]) {i=2, j=4, k=2, l=2, m=2, n=2, o=2}"
        " blocked_propagation={l, m, n, o}"
    )


def test_a_kernel_that_stays_whole_says_why():
    eqn = kernel_of(kernels.numbered, (8, 4))
    rule = rule_for("pallas_call", ((8, 4),), ((8, 4),), eqn.params)
    assert rule.sizes == ()
    assert "no grid axis" in rule.reason


def test_operations_are_those_of_the_body_at_each_step_or_what_the_author_says():
    eqn = kernel_of(kernels.attention, *HEADS)
    products = 2 * (2 * 16 * 2 * 4)
    assert 32 * products <= kernel_flops(eqn.params) < 40 * products
    assert kernel_flops({**eqn.params, "cost_estimate": type("Estimate", (), FLOPS)}) == 3000
