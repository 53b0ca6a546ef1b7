"""Reductions against Shardy and on eight devices."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.ir.rule import FactorKind
from tests.rules.cases import Case
from tests.rules.numeric_oracle import equation

INTS = jnp.arange(8 * 8 * 4, dtype=jnp.int32).reshape(8, 8, 4) * 7 % 31
BOOLS = INTS % 2 == 0
GATHERS = ("all-gather",)


def pool(init, reducer, window=(1, 2, 1), strides=(1, 1, 1), padding="SAME"):
    return lambda x: lax.reduce_window(x, init, reducer, window, strides, padding)


def pool_tangent(tangents, x):
    return jax.jvp(pool(-jnp.inf, lax.max), (x,), (tangents,))[1]


def pool_gradient(source, x):
    _, pull = jax.vjp(pool(-jnp.inf, lax.max), x)
    return pull(source)[0]


NO_ALL_REDUCE = ("Shardy splits operand 0 dim 0 reduction, we don't",)
"""XLA's CPU backend refuses such an all-reduce (Unsupported reduction computation)."""
STARTS = tuple(f"Shardy splits operand 0 dim {dim} reduction, we don't" for dim in (0, 1))
"""XLA lets every device start with the initial value."""

REDUCTIONS = [
    Case("reduce_sum", lambda x: lax.reduce_sum(x, axes=(1,)), ((8, 8, 4),), "stablehlo.reduce"),
    Case("reduce_max", lambda x: lax.reduce_max(x, axes=(0, 2)), ((8, 8, 4),), "stablehlo.reduce"),
    Case("reduce_min", lambda x: lax.reduce_min(x, axes=(0,)), ((8, 8, 4),), "stablehlo.reduce"),
    Case("reduce_prod", lambda x: lax.reduce_prod(x, axes=(0,)), ((8, 8),), "stablehlo.reduce"),
    Case("reduce_and", lambda x: lax.reduce_and(x, axes=(0,)), (BOOLS,), "stablehlo.reduce"),
    Case("reduce_or", lambda x: lax.reduce_or(x, axes=(0,)), (BOOLS,), "stablehlo.reduce"),
    Case("reduce_xor", lambda x: lax.reduce_xor(x, axes=(0,)), (INTS,), "stablehlo.reduce", explained=NO_ALL_REDUCE),
    Case("argmax", lambda x: lax.argmax(x, 1, jnp.int32), (INTS,), "stablehlo.reduce", (0,), (0,), also=GATHERS),
    Case("argmin", lambda x: lax.argmin(x, 0, jnp.int32), (INTS,), "stablehlo.reduce", (0,), (0,), also=GATHERS),
    Case(
        "reduce", lambda x: lax.reduce(x, 0.0, lambda a, b: jnp.hypot(a, b), (0,)), ((8, 8),), "stablehlo.reduce", explained=NO_ALL_REDUCE
    ),
    Case("reduce", lambda x: lax.reduce(x, 3.0, lax.add, (0,)), ((8, 8),), "stablehlo.reduce", explained=STARTS[:1], label="a sum from 3"),
    Case("reduce", lambda x: lax.reduce(x, 2.0, lax.mul, (0, 1)), ((8, 8, 4),), "stablehlo.reduce", explained=STARTS, label="a product"),
    Case("reduce", lambda x: lax.reduce(x, -3.0, lax.max, (1,)), ((8, 8),), "stablehlo.reduce", label="at least -3"),
]
WINDOWS = [
    Case("reduce_window_sum", pool(0.0, lax.add), ((8, 8, 8),), "stablehlo.reduce_window"),
    Case("reduce_window_max", pool(-jnp.inf, lax.max, padding="VALID"), ((8, 8, 8),), "stablehlo.reduce_window", label="valid windows"),
    Case("reduce_window_min", pool(jnp.inf, lax.min), ((8, 8, 8),), "stablehlo.reduce_window"),
    Case("reduce_window", pool(1.0, lax.mul), ((8, 8, 8),), "stablehlo.reduce_window"),
    Case("select_and_scatter_add", pool_gradient, ((8, 8, 8), (8, 8, 8)), "stablehlo.select_and_scatter", (1, 0)),
]
TANGENT = Case("select_and_gather_add", pool_tangent, ((8, 8, 8), (8, 8, 8)))


@pytest.mark.parametrize("case", [*REDUCTIONS, *WINDOWS], ids=str)
def test_reductions_have_the_factors_that_shardy_gives_them(case):
    assert case.disagreements() == sorted(case.explained)


@pytest.mark.parametrize("case", [*REDUCTIONS, *WINDOWS, TANGENT], ids=str)
def test_every_sharding_of_a_reduction_gives_the_one_device_result(case):
    case.check()


def test_a_reducer_of_one_equation_names_the_combiner():
    def combiner(reducer):
        return equation(lambda x: lax.reduce(x, jnp.float32(0), reducer, (0,)), jnp.ones((8, 8)), primitive="reduce").rule.combiner

    assert combiner(lambda a, b: lax.max(a, b)) == "max"
    assert combiner(lambda a, b: lax.max(a, b) + 1) == "custom"


def test_the_windowed_dimension_of_a_pool_is_never_split():
    case = WINDOWS[0]
    rule = equation(case.function, *case.values(), primitive=case.primitive).rule
    assert rule.kinds == (FactorKind.PASS_THROUGH, FactorKind.PERMUTATION, FactorKind.PASS_THROUGH)
    assert rule.splittable == (True, False, True)
