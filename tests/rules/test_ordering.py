"""Sorting, selecting and accumulating against Shardy and on eight devices."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.rules.cases import Case

SHAPE = (8, 8, 8)
VALUES = jnp.asarray(np.random.default_rng(0).permutation(512).reshape(SHAPE), jnp.float32)


def cumulative(name, axis=1):
    function = getattr(lax, name)
    return lambda x: function(x, axis=axis)


GATHERS = ("all-gather",)
"""XLA's CPU partitioner gathers the operand of a top-k, whichever dimension is split."""

SORTS = [
    Case("sort", lambda x: lax.sort(x, dimension=1), (SHAPE,), "stablehlo.sort"),
    Case("sort", lambda x, y: lax.sort((x, y), dimension=2, num_keys=1), (VALUES, SHAPE), "stablehlo.sort", label="sort by a key"),
]
TOTALS = [
    Case("cumsum", cumulative("cumsum"), (SHAPE,), "stablehlo.reduce_window"),
    Case("cumprod", cumulative("cumprod"), (SHAPE,), "stablehlo.reduce_window"),
    Case("cummax", cumulative("cummax", 2), (SHAPE,), "stablehlo.reduce_window"),
    Case("cummin", cumulative("cummin", 0), (SHAPE,), "stablehlo.reduce_window"),
]
SELECTIONS = [
    Case("cumlogsumexp", cumulative("cumlogsumexp"), (SHAPE,)),
    Case("top_k", lambda x: lax.top_k(x, 3), (VALUES,), also=GATHERS),
    Case("top_k", lambda x: lax.top_k(x, 3, axis=1), (VALUES,), label="top_k of the middle", also=GATHERS),
    Case("approx_top_k", lambda x: lax.approx_max_k(x, 3), (VALUES,)),
]


@pytest.mark.parametrize("case", [*SORTS, *TOTALS], ids=str)
def test_ordering_ops_have_the_factors_that_shardy_gives_them(case):
    assert case.disagreements() == []


@pytest.mark.parametrize("case", [*SORTS, TOTALS[0], TOTALS[2], *SELECTIONS], ids=str)
def test_every_sharding_of_an_ordering_op_gives_the_one_device_result(case):
    rule = case.check()
    assert sum(rule.splittable) == 2
