"""What integer identities make known is dropped from the step, so that no collective of it is planned; floats stay as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import spmdctx
from benchmarks.split_checks import FREE_LINKS
from spmdctx.trace.build.jaxprs.constants import without_constants
from tests.road import trace

X = jnp.arange(1.0, 17.0)
N = jnp.arange(16, dtype=jnp.int32)

KNOWN = {
    "xor": lambda n, x: n ^ n,
    "xor of bools": lambda n, x: (x > 3) ^ (x > 3),
    "difference": lambda n, x: n - n,
    "difference of equals": lambda n, x: n * 3 - n * 3,
    "product": lambda n, x: n * 0,
    "product with zeros": lambda n, x: n * jnp.zeros_like(n),
    "narrow": lambda n, x: n.astype(jnp.int8) & 0,
    "and": lambda n, x: (x > 3) & jnp.zeros(16, bool),
    "or": lambda n, x: (n > 3) | (jnp.ones(16, jnp.int32) > 0),
    "all bits": lambda n, x: n.astype(jnp.uint8) | 255,
    "equal": lambda n, x: n == n,
    "less": lambda n, x: n < n,
    "power": lambda n, x: jax.lax.integer_pow(x, 0),
    "choice": lambda n, x: jnp.where(n != n, x, 2.0),
    "choice by shape": lambda n, x: jnp.where(jnp.ones((4, 4), bool).reshape(16), 5.0, x),
    "through a call": lambda n, x: jax.jit(lambda keep: jnp.where(keep, x, 1.0))(n < n),
    "out of a call": lambda n, x: jnp.where(jax.jit(lambda n: n < n)(n), x, 1.0),
    "remat": lambda n, x: jnp.where(jax.checkpoint(lambda n: n ^ n)(n) == 1, x, 1.0),
    "sort of single elements": lambda n, x: jnp.argsort(x[:, None], axis=1),
    "place of a single element": lambda n, x: jnp.argmax(x[:, None], axis=1) + jnp.argmin(n.reshape(4, 1, 4), axis=1).sum(),
    "update of everything": lambda n, x: jax.lax.dynamic_update_slice(x, jnp.ones(16), (n[3],)),
    "slice of everything": lambda n, x: jax.lax.dynamic_slice(jnp.ones(16), (n[3],), (16,)),
    "start that no turn reads": lambda n, x: jax.lax.scan(lambda c, _: (jnp.ones(16), None), x * 2, None, length=3)[0],
    "start of a loop in a loop": lambda n, x: jax.lax.scan(
        lambda c, _: (jax.lax.scan(lambda d, _: (jnp.ones(16), None), c, None, length=2)[0], None), x, None, length=3
    )[0],
    "scatter over everything": lambda n, x: x.reshape(1, 16).at[np.array([0])].set(2.0),
    "scatter from the end": lambda n, x: x.reshape(1, 4, 4).at[np.array([-1])].set(jnp.ones((4, 4))),
    "scatter into a last dimension": lambda n, x: n.reshape(4, 4, 1).at[:, :, np.array([0])].set(3),
    "scatter at two places": lambda n, x: x.reshape(1, 16, 1)[:, :, :1].at[np.array([0]), :, np.array([0])].set(1.0),
    "scatter of a row": lambda n, x: x.reshape(1, 16).at[0].set(jnp.ones(16), mode="drop"),
    "scattered sum": lambda n, x: jax.grad(lambda x: jnp.sum(x.reshape(1, 16).at[np.array([0])].set(0.0) ** 2))(x),
    "branch": lambda n, x: jax.lax.cond(jnp.zeros((), bool), lambda: x, lambda: jnp.full(16, 3.0)),
    "branch by identity": lambda n, x: jax.lax.cond((n[0] ^ n[0]) == 1, lambda: x * 2, lambda: jnp.full(16, 3.0)),
}

OPEN = {
    "difference of floats": lambda n, x: x - x,
    "product of floats": lambda n, x: x * 0.0,
    "isnan": lambda n, x: x != x,
    "equal floats": lambda n, x: x == x,
    "quotient": lambda n, x: n // jnp.maximum(n, 1),
    "different": lambda n, x: (n + 1) - (n + 2),
    "one case": lambda n, x: jnp.where(jnp.ones(16, bool), x, 2.0),
    "random": lambda n, x: jnp.where(jax.random.bits(jax.random.key(0), (16,), jnp.uint32) > 7, x, 2.0),
    "sort of two": lambda n, x: jnp.argsort(x.reshape(8, 2), axis=1),
    "place among two": lambda n, x: jnp.argmax(x.reshape(8, 2), axis=1),
    "slice of a part": lambda n, x: jax.lax.dynamic_slice(x, (n[3],), (15,)),
    "update of a part": lambda n, x: jax.lax.dynamic_update_slice(x, jnp.ones(15), (n[3],)),
    "scatter of a part": lambda n, x: x.reshape(2, 8).at[np.array([0])].set(2.0),
    "scatter beyond the end": lambda n, x: x.reshape(1, 16).at[np.array([1])].set(2.0),
    "scatter somewhere": lambda n, x: x.reshape(1, 16).at[n[:1]].set(2.0),
    "scatter of sums": lambda n, x: x.reshape(1, 16).at[np.array([0])].add(2.0),
    "start that a turn reads": lambda n, x: jax.lax.scan(lambda c, _: (c, jnp.ones(())), x * 2, None, length=3)[0],
    "start of no turn": lambda n, x: jax.lax.scan(lambda c, _: (jnp.ones(16), None), x * 2, None, length=0)[0],
    "start that a while may keep": lambda n, x: jax.lax.while_loop(lambda c: c[0] > 4, lambda c: jnp.ones(16), x),
    "norm": lambda n, x: (x - x.mean()) * jax.lax.rsqrt(jnp.var(x) + 1e-5),
}


def folded(function):
    jaxpr = jax.make_jaxpr(function)(N, X)
    return jaxpr, without_constants(jaxpr)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_depends_on_no_argument(name):
    jaxpr, made = folded(KNOWN[name])
    graph = trace(jaxpr_as_fun(made), N, X).graph
    assert not {value for op in graph.ops for value in op.operands}.intersection(graph.inputs)
    for got, want in zip(jaxpr_as_fun(made)(N, X), jaxpr_as_fun(jaxpr)(N, X), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("name", OPEN)
def test_what_may_depend_on_an_argument_stays_as_it_is(name):
    jaxpr, made = folded(OPEN[name])
    assert made is jaxpr


def test_bodies_of_loops_are_folded_by_themselves():
    def looped(n, x):
        def turn(carry, row):
            return carry + jnp.where(row < row, carry, 1.0).sum(), jax.lax.while_loop(lambda r: r[0] < 9, lambda r: r + 1 + (r ^ r), row)

        return jax.lax.scan(turn, jnp.float32(0), n.reshape(4, 4))

    jaxpr, made = folded(looped)
    assert "select_n" in str(jaxpr)
    assert "select_n" not in str(made)
    assert " xor" not in str(made)
    for got, want in zip(jaxpr_as_fun(made)(N, X), jax.tree.leaves(looped(N, X)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_two_draws_are_not_taken_for_one():
    jaxpr = jax.make_jaxpr(lambda x: jax.pure_callback(lambda x: x, N, x) - jax.pure_callback(lambda x: x, N, x))(N)
    assert without_constants(jaxpr) is jaxpr


STEPS = {
    "a mask of nothing": lambda x, w: jnp.sum(jnp.where((x @ w > 1) ^ (x @ w > 1), jnp.tanh(x @ w), 0.0) ** 2) + jnp.sum(x),
    "integer weights": lambda x, w: jnp.sum(jnp.round(x @ w).astype(jnp.int32) * 0) + jnp.sum(x),
    "an order of single rows": lambda x, w: jnp.sum(jnp.argsort(jnp.sum(x @ w, 1, keepdims=True), axis=1)) + jnp.sum(x),
    "a start": lambda x, w: jax.lax.scan(lambda c, row: (jnp.sum(row), None), jnp.sum(x @ w), x)[0],
    "a branch": lambda x, w: jax.lax.cond(jnp.array(False), lambda: jnp.sum(x @ w), lambda: jnp.sum(x * x)),
    "a scatter": lambda x, w: jnp.sum((x @ w)[None].at[np.array([0])].set(jnp.sin(x[:, :8])) ** 2) + jnp.sum(x),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_what_is_dropped_is_neither_planned_nor_compiled(name, search):
    step = spmdctx.parallel(
        jax.value_and_grad(STEPS[name]), parallel_mode="auto_parallel", search_mode=search, device_num=8, topology=FREE_LINKS
    )
    arguments = X.reshape(16, 1) * jnp.ones((16, 32)), jnp.ones((32, 8))
    report = step.audit(*arguments)
    assert report.planned_bytes, str(report)
    assert (report.missing, report.unplanned) == ((), ()), str(report)
    for got, want in zip(step(*arguments), jax.value_and_grad(STEPS[name])(*arguments), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
