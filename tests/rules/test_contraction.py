"""Dot products against Shardy and on eight devices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.rules import rule_for
from tests.rules.cases import Case


def dot(*numbers):
    return lambda x, y: lax.dot_general(x, y, numbers)


def ragged(contracting, batch, ragged_dims, groups):
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), ragged_dims, groups)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


DOTS = [
    Case("dot_general", dot(((1,), (0,)), ((), ())), ((8, 16), (16, 8)), label="matrix product"),
    Case("dot_general", dot(((2,), (1,)), ((0,), (0,))), ((8, 8, 16), (8, 16, 8)), label="batched"),
    Case("dot_general", dot(((3, 1), (0, 2)), ((), ())), ((8, 2, 8, 4), (4, 8, 2)), label="two contracted dims"),
    Case("dot_general", dot(((3,), (3,)), ((2, 0), (0, 1))), ((8, 8, 4, 8), (4, 8, 8, 8)), label="batch dims out of order"),
    Case("dot_general", dot(((), ()), ((), ())), ((8,), (8,)), label="outer product"),
    Case("dot_general", dot(((1,), (0,)), ((), ())), ((1, 8), (8, 8)), label="one row"),
]
SIZES = jnp.array([4, 0, 3, 9], jnp.int32)
ROWS_OF_SIZES = jnp.stack([jnp.roll(SIZES, row) for row in range(8)])
RAGGED = [
    Case("ragged_dot_general", lax.ragged_dot, ((16, 8), (4, 8, 8), SIZES), label="ragged rows"),
    Case("ragged_dot_general", ragged(((0,), (0,)), ((), ()), [0], []), ((16, 8), (16, 8), SIZES), label="ragged contraction"),
    Case("ragged_dot_general", ragged(((2,), (1,)), ((), ()), [1], [0]), ((8, 16, 8), (4, 8, 8), ROWS_OF_SIZES), label="sizes by row"),
    Case("ragged_dot_general", ragged(((0, 1), (0, 1)), ((), ()), [1], []), ((8, 16, 8), (8, 16, 8), ROWS_OF_SIZES), label="sizes by term"),
]

TINY = jnp.arange(8 * 64).reshape(8, 64) % 5
SCALED = Case(
    "scaled_dot",
    lambda x, y, left, right: lax.scaled_dot(x, y, lhs_scale=left, rhs_scale=right),
    (TINY.astype(jnp.float8_e4m3fn), TINY.T.astype(jnp.float8_e4m3fn), jnp.ones((8, 2), jnp.bfloat16), jnp.ones((2, 8), jnp.bfloat16)),
)


@pytest.mark.parametrize("case", DOTS, ids=str)
def test_dots_have_the_factors_that_shardy_gives_them(case):
    assert replace(case, op="stablehlo.dot_general").disagreements() == []


@pytest.mark.parametrize("case", [*DOTS, *RAGGED, SCALED], ids=str)
def test_every_sharding_of_a_dot_gives_the_one_device_result(case):
    case.check()


def test_a_scaled_dot_splits_its_contraction_by_whole_blocks():
    rule = rule_for("scaled_dot", ((8, 64), (64, 8), (8, 2), (2, 8)), ((8, 8),), {"dimension_numbers": (((1,), (0,)), ((), ()))})
    assert str(rule).startswith("([j, (i l)], [(i l), k], [j, i], [i, k])->([j, k]) {i=2, j=8, k=8, l=32} reduction={i, l}")
    assert rule.splittable == (True, True, True, False)


@pytest.mark.parametrize(
    ("case", "factors"),
    [
        (RAGGED[0], "[j, i], [l, i, k], [1]"),
        (RAGGED[1], "[i, j], [i, k], [1]"),
        (RAGGED[2], "[j, k, i], [m, i, l], [j, 1]"),
        (RAGGED[3], "[i, j, k], [i, j, l], [i, 1]"),
    ],
    ids=str,
)
def test_sizes_of_groups_split_with_the_rows_that_have_their_own(case, factors):
    (equation,) = jax.make_jaxpr(case.function)(*case.values()).eqns
    operands, results = ([value.aval.shape for value in values] for values in (equation.invars, equation.outvars))
    assert str(rule_for("ragged_dot_general", tuple(operands), tuple(results), equation.params)).startswith(f"({factors})->")
