"""Operation counts against counts by hand."""

from functools import partial

import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.rules.flops import op_flops
from tests.rules.numeric_oracle import equation

CONV = "conv_general_dilated"


def conv(**options):
    return lambda x, kernel: lax.conv_general_dilated(x, kernel, **{"window_strides": (1, 1), "padding": "SAME", **options})


def flops(primitive, function, *args):
    eqn = equation(function, *args, primitive=primitive)
    return op_flops(primitive, eqn.rule, eqn.operands, eqn.results)


@pytest.mark.parametrize(
    ("primitive", "function", "shapes", "expected"),
    [
        ("dot_general", lambda x, y: x @ y, ((8, 16), (16, 4)), 2 * 8 * 16 * 4),
        ("dot_general", lambda x, y: lax.batch_matmul(x, y), ((3, 8, 16), (3, 16, 4)), 2 * 3 * 8 * 16 * 4),
        ("dot_general", lambda x, y: x @ y, ((1, 16), (16, 1)), 2 * 16),
        ("conv_general_dilated", conv(), ((2, 3, 8, 8), (5, 3, 3, 3)), 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)),
        ("conv_general_dilated", conv(feature_group_count=4), ((2, 4, 8, 8), (4, 1, 3, 3)), 2 * (2 * 4 * 8 * 8) * (3 * 3)),
        ("conv_general_dilated", conv(batch_group_count=2), ((4, 4, 8, 8), (6, 4, 3, 3)), 2 * (2 * 6 * 8 * 8) * (4 * 3 * 3)),
        ("reduce_sum", lambda x: lax.reduce_sum(x, axes=(0,)), ((8, 16),), 8 * 16),
        ("exp", jnp.exp, ((8, 16),), 8 * 16),
        ("transpose", jnp.transpose, ((8, 16),), 0),
        ("sort", lambda x: lax.sort(x, dimension=1), ((8, 16),), 8 * 16 * 4),
        ("fft", lambda x: lax.fft(x, "RFFT", (16,)), ((8, 16),), 5 * 8 * 16 * 4),
        ("cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), ((2, 6, 6),), 2 * 6**3 // 3),
    ],
)
def test_operations_are_those_counted_by_hand(primitive, function, shapes, expected):
    assert flops(primitive, function, *(jnp.ones(shape) for shape in shapes)) == expected


def test_zeros_between_elements_are_not_multiplied():
    apart = equation(conv(padding=[(1, 2)] * 2, lhs_dilation=(2, 2)), jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3)), primitive=CONV)
    assert op_flops(CONV, apart.rule, apart.operands, apart.results, {"lhs_dilation": (2, 2)}) == 2 * (2 * 5 * 16 * 16) * (3 * 3 * 3) // 4


def test_each_row_of_a_ragged_dot_meets_one_group():
    sizes = jnp.array([3, 5], jnp.int32)
    assert flops("ragged_dot_general", lax.ragged_dot, jnp.ones((8, 16)), jnp.ones((2, 16, 4)), sizes) == 2 * 8 * 16 * 4


def test_every_group_multiplies_all_rows_where_these_are_contracted():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    product = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
    assert flops("ragged_dot_general", product, jnp.ones((8, 16)), jnp.ones((8, 4)), jnp.array([3, 5], jnp.int32)) == 2 * 2 * 8 * 16 * 4


def test_a_scatter_adds_its_updates_only():
    def scatter(x, rows, updates):
        return x.at[rows].add(updates)

    assert flops("scatter-add", scatter, jnp.ones((100, 4)), jnp.array([1, 2]), jnp.ones((2, 4))) == 2 * 4
