"""Elementwise ops against Shardy and on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdctx.rules import RULES, rule_for
from spmdctx.rules.elementwise import BINARY, MANY, UNARY
from tests.rules.cases import Case
from tests.rules.numeric_oracle import COLLECTIVE, equation

BOOLS = jnp.arange(64).reshape(8, 8) % 3 == 0
INTS = jnp.arange(64, dtype=jnp.int32).reshape(8, 8)
CASES = [
    Case("add", lax.add, ((8, 8), (8, 8)), "stablehlo.add"),
    Case("exp", lax.exp, ((8, 16),), "stablehlo.exponential"),
    Case("convert_element_type", lambda x: lax.convert_element_type(x, jnp.bfloat16), ((8, 8),), "stablehlo.convert"),
    Case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), ((8, 8),), "stablehlo.reduce_precision"),
    Case("select_n", lax.select_n, (BOOLS, (8, 8), (8, 8)), "stablehlo.select"),
    Case("select_n", lax.select_n, (jnp.array(True), (8, 8), (8, 8)), "stablehlo.select", label="select by a scalar"),
    Case("clamp", lax.clamp, (jnp.float32(0), (8, 8), jnp.float32(1)), "stablehlo.clamp", (1,), label="clamp by scalars"),
    Case("clamp", lax.clamp, ((8, 8), (8, 8), (8, 8)), "stablehlo.clamp"),
    Case("lt", lax.lt, ((8, 8), (8, 8)), "stablehlo.compare"),
    Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), ((8, 8),), "stablehlo.bitcast_convert"),
]
NARROW = Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint8), ((8, 8),), label="bitcast to bytes")
WIDE = Case(
    "bitcast_convert_type",
    lambda x: lax.bitcast_convert_type(x, jnp.int32),
    (jnp.arange(256, dtype=jnp.uint8).reshape(8, 8, 4),),
    label="bitcast from bytes",
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_elementwise_ops_have_the_factors_that_shardy_gives_them(case):
    assert case.disagreements() == []


@pytest.mark.parametrize("case", [CASES[0], *CASES[4:7], NARROW, WIDE], ids=str)
def test_every_sharding_of_an_elementwise_op_gives_the_one_device_result(case):
    case.check()


def test_an_operand_of_size_one_broadcasts_and_takes_no_part_in_that_dimension():
    rule = rule_for("add", ((8, 1), (8, 4), ()), ((8, 4),), {})
    assert str(rule) == "([i, 1], [i, j], [])->([i, j]) {i=8, j=4}"


def test_the_coefficients_of_a_polynomial_broadcast_against_its_argument():
    rule = rule_for("polynomial", ((4, 8), (), (4, 1)), ((4, 8),), {})
    assert str(rule) == "([i, j], [], [i, 1])->([i, j]) {i=4, j=8}"


def test_each_operand_of_an_optimization_barrier_has_its_own_factors():
    rule = rule_for("optimization_barrier", ((8, 4), (4,)), ((8, 4), (4,)), {})
    assert str(rule) == "([i, j], [k])->([i, j], [k]) {i=8, j=4, k=4}"


def real(*names):
    return [(name, getattr(lax, name)) for name in names]


SPLIT_UNARY = [
    *real("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "cos", "cosh"),
    *real("digamma", "erf", "erf_inv", "erfc", "exp2", "expm1", "floor", "is_finite", "lgamma", "log", "log1p", "logistic"),
    *real("neg", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh"),
    ("integer_pow", lambda x: lax.integer_pow(x, 3)),
    ("copy", jnp.copy),
    *real(*(name for name in ("log2", "one_minus_square") if hasattr(lax, name))),  # they came after jax 0.10.2
]
SPLIT_BINARY = [
    *real("add", "atan2", "div", "eq", "ge", "gt", "le", "max", "min", "mul", "ne", "nextafter", "pow", "rem", "sub"),
    ("complex", lax.complex),
    ("zeta", lambda x, y: lax.zeta(x + 1.5, y)),
]
SPLIT_INTEGERS = real("bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right_arithmetic", "shift_right_logical")
SPLIT_INTEGER = real("clz", "population_count", "bitwise_not")


def quiet(x, y, n):
    return [
        *(function(x) for _, function in SPLIT_UNARY),
        *(function(x, y) for _, function in SPLIT_BINARY),
        *(function(n, n) for _, function in SPLIT_INTEGERS),
        *(function(n) for _, function in SPLIT_INTEGER),
        *(function(lax.complex(x, y)) for function in (lax.real, lax.imag, lax.conj)),
    ]


def iterative(x, y, n):
    special = (lax.igamma, lax.igammac, lax.igamma_grad_a)
    return [*(function(x, y) for function in special), lax.betainc(x + 1, y, x), lax.polygamma(jnp.ones_like(x), y)]


@pytest.mark.parametrize(("outputs", "allowed"), [(quiet, set()), (iterative, {"all-reduce"})], ids=["elementwise", "until all converge"])
def test_split_elementwise_ops_give_one_device_s_result_and_ask_only_for_convergence(outputs, allowed):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("x", "y"))
    uniform = np.random.default_rng(0).uniform(0.1, 0.9, (2, 8, 8)).astype(np.float32)
    args = [jax.device_put(value, split) for value in (*uniform, np.arange(64, dtype=np.int32).reshape(8, 8))]
    compiled = jax.jit(outputs, out_shardings=split).lower(*args).compile()
    for own, whole in zip(compiled(*args), jax.jit(outputs)(*uniform, INTS), strict=True):
        np.testing.assert_allclose(own, whole, rtol=1e-5, atol=1e-5)
    assert set(COLLECTIVE.findall(compiled.as_text())) <= allowed


@pytest.mark.parametrize("name", ["clz", "logistic", "erf_inv", "cbrt"])
def test_a_unary_op_passes_every_dimension_through(name):
    value = INTS if name == "clz" else jnp.ones((8, 8))
    rule = equation(getattr(lax, name), value, primitive=name).rule
    assert str(rule) == "([i, j])->([i, j]) {i=8, j=8}"


def test_every_elementwise_name_is_in_the_table_once():
    names = [*UNARY, *BINARY, *MANY]
    assert len(names) == len(set(names))
    assert set(names) <= set(RULES)
