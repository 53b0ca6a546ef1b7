"""Results that the partitioner can only split as planned carry no constraint."""

import functools

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.machine.xla.partitioner.needed_constraints import NeededConstraints
from tests.road import MESH, ops, run, spread, trace

X, W = jnp.ones((32, 64)), jnp.ones((64, 64))
BOTH, D, M = ("data", "model"), ("data",), ("model",)


def anchors(function, pins, moved=()):
    """The primitives of the ops that need a constraint."""
    program = trace(function, X, W)
    found = NeededConstraints(program.graph, program.from_literals, spread(program, pins), MESH, moved)
    return [op.primitive for op in program.graph.ops if op in found]


def test_products_of_rows_split_over_all_axes_need_none():
    assert anchors(lambda x, w: jnp.exp((x @ w).T), {0: (BOTH, ()), 1: ((), ())}) == []


@pytest.mark.parametrize("rows", [(), D], ids=["whole", "over one axis"])
def test_results_that_could_be_split_further_need_one(rows):
    assert anchors(lambda x, w: x @ w, {0: (rows, ()), 1: ((), ())}) == ["dot_general"]


def test_a_product_that_is_split_both_ways_needs_none():
    assert anchors(lambda x, w: x @ w, {0: (D, ()), 1: ((), M)}) == []


def test_a_result_that_some_reader_takes_otherwise_needs_one():
    def function(x, w):
        return x @ w

    (dot,) = ops(trace(function, X, W), "dot_general")
    assert anchors(function, {0: (BOTH, ()), 1: ((), ())}, moved=dot.results) == ["dot_general"]


def test_what_no_operand_hands_on_needs_one():
    assert "iota" in anchors(lambda x, w: x + jnp.arange(64.0) + w[:32], {0: ((), BOTH), 1: ((), BOTH)})


CONSTANT = jnp.linspace(-1.0, 1.0, 4)


def broadcast(x):
    return jnp.broadcast_to(x[:, None], (8, 4))


def drawn(key):
    return jax.random.normal(key, (8, 4))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (broadcast, X[:8, 0]),
        (lambda x: jnp.sin(broadcast(x)) * jnp.cos(broadcast(2 * x)), X[:8, 0]),
        (lambda x: x[:, None] * jnp.arange(4.0), X[:8, 0]),
        (lambda x: x[:, None] * CONSTANT, X[:8, 0]),
        (lambda x: jnp.einsum("i,j->ij", x, CONSTANT), X[:8, 0]),
        (lambda x: jnp.einsum("j,i->ij", CONSTANT, x), X[:8, 0]),
        (lambda x: jnp.where(x[:, None] > 0, 1.0, jnp.arange(4.0)), X[:8, 0]),
        (drawn, jax.random.key(0)),
        (lambda key: jnp.exp(drawn(key)) + 1, jax.random.key(0)),
    ],
    ids=["broadcast", "two broadcasts", "iota", "constant", "outer", "turned outer", "select", "drawn", "drawn and more"],
)
def test_a_pinned_split_that_no_operand_hands_on_is_kept(make, argument):
    @functools.partial(spmdctx.parallel, parallel_mode="auto_parallel", search_mode="sharding_propagation", device_num=8)
    def step(value):
        return jnp.sum(spmdctx.shard(lambda made: made * made, ((2, 4),))(make(value)))

    report = step.audit(argument)
    assert report.ok, report
    assert [row.axes for row in report.rows] == [("data", "model")]


def test_a_broadcast_that_meets_a_split_operand_needs_none():
    assert "broadcast_in_dim" not in anchors(lambda x, w: x + jnp.broadcast_to(jnp.exp(w[0]), (32, 64)), {0: (D, M), 1: ((), M)})


@pytest.mark.parametrize("reader", [jnp.square, jnp.exp, lambda wide: wide * 3 - 1], ids=["square", "exp", "two ops"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["a scalar", "one element"])
def test_a_repeated_scalar_that_is_a_result_is_split_for_other_readers_too(reader, shape):
    def step(scalar):
        wide = jnp.broadcast_to(scalar, (8,))
        return wide, jnp.sum(reader(wide))

    scalar = jnp.full(shape, 0.5)
    *_, wide = ops(trace(step, scalar), "broadcast_in_dim")
    found = run(step, scalar, pins={wide: (BOTH,)})
    assert found.planned
    found.check()


ERF = {
    "alone": lambda x: jnp.sum(jax.lax.erf(x * 2)),
    "and more": lambda x: jnp.sum(jnp.exp(jax.lax.erf(x) + 1)),
    "gradient": lambda x: jax.value_and_grad(lambda x: jnp.mean(jax.lax.erf(x / 2).astype(jnp.float32)))(x),
    "twice": lambda x: jnp.max(jax.lax.erf(jax.lax.erf(x))),
}


@pytest.mark.parametrize("name", ERF)
def test_erf_keeps_the_split_that_shardy_does_not_hand_on(name):
    found = run(ERF[name], X.astype(jnp.float16), pins={0: (BOTH, ())})
    assert found.planned
    found.check()


def test_erf_that_meets_a_split_operand_needs_no_constraint():
    assert "erf" not in anchors(lambda x, w: jnp.sum(jax.nn.gelu(x @ w, approximate=False)), {0: (D, ()), 1: ((), M)})
    assert "erf" in anchors(lambda x, w: jnp.sum(jax.lax.erf(x @ w)), {0: (D, ()), 1: ((), M)})
