"""Which values of a traced step exist in memory."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.road import ops, trace

X, W = jnp.ones((32, 64)), jnp.ones((64, 64))


def materialized(program, primitive):
    """Whether the results of the ops of one primitive are in memory."""
    return [not op.fused >> len(op.operands) & 1 for op in ops(program, primitive)]


def test_a_chain_before_a_product_is_computed_in_it():
    program = trace(lambda x, w: jnp.exp(x) @ w, X, W)
    assert materialized(program, "exp") == [False]
    assert ops(program, "dot_general")[0].fused == 0b001


def test_a_product_hands_its_result_to_its_only_reader():
    program = trace(lambda x, w: jnp.exp(x @ w), X, W)
    assert materialized(program, "dot_general") == [False]
    assert materialized(program, "exp") == [True]


LOW = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("follow", "is_kept"),
    [
        (lambda y: (jnp.sin(z := jnp.tanh(y.astype(jnp.float32) * 2)), jnp.cos(z)), True),
        (lambda y: (jnp.sin(z := jnp.tanh(y * 2)), jnp.cos(z)), False),
        (lambda y: jnp.sin(jnp.tanh(y.astype(jnp.float32) * 2)), False),
        (lambda y: jax.nn.softmax(y.astype(jnp.float32) * 2) @ W, False),
    ],
    ids=["forks wide", "forks in its precision", "does not fork", "rows of a softmax"],
)
def test_a_product_whose_chain_forks_at_a_wider_value_is_kept_itself(follow, is_kept):
    program = trace(lambda x, w: follow(x @ w), *LOW)
    assert materialized(program, "dot_general")[0] == is_kept
    if is_kept:
        assert materialized(program, "tanh") == [False]


def test_a_comparison_whose_ways_meet_again_is_kept_behind_them():
    def loss(x, w):
        logits = 30 * jnp.tanh((x @ w).astype(jnp.float32) / 30)
        return jax.nn.logsumexp(logits, 1).sum() - jnp.take_along_axis(logits, jnp.zeros((32, 1), int), 1).sum()

    program = trace(jax.grad(loss, argnums=(0, 1)), *LOW)
    assert materialized(program, "mul")[1:] == [False] * (len(ops(program, "mul")) - 1)
    assert materialized(program, "convert_element_type") == [False, True]


def test_what_a_sort_reads_is_in_memory():
    program = trace(lambda x: lax.sort(jnp.exp(jnp.sin(x))).sum(), X)
    assert materialized(program, "exp") == [True]
    assert materialized(program, "sin") == [False]


def test_a_literal_is_nowhere_in_memory():
    program = trace(lambda x: x * 2.0, X)
    assert ops(program, "mul")[0].fused == 0b010


def test_a_sum_of_many_tensors_that_several_ops_read_is_kept():
    def function(terms):
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return jnp.sin(total) @ W, jnp.cos(total) @ W

    few, many = (trace(lambda *terms: function(terms), *[X] * count) for count in (2, 6))
    assert materialized(few, "add") == [False]
    assert materialized(many, "add") == [False] * 4 + [True]


def test_small_tensors_that_are_spread_out_make_nothing_kept():
    def function(x, *small):
        total = x
        for one in small:
            total = total * (one * 2.0 + 1.0)
        return jnp.sin(total) @ W, jnp.cos(total) @ W

    rows, tables = (trace(function, X, *[jnp.ones(shape)] * 5) for shape in ((64,), (32, 64)))
    assert materialized(rows, "mul") == [False] * 10
    assert materialized(tables, "mul") == [False] * 9 + [True]


def test_a_scatter_of_one_element_per_row_is_a_comparison():
    labels = jnp.zeros((32,), int)
    picked = trace(jax.grad(lambda x: jnp.take_along_axis(jnp.sin(x), labels[:, None], 1).sum()), X)
    table = trace(jax.grad(lambda w: jnp.sin(w)[labels].sum()), W)
    assert materialized(picked, "scatter-add") == [False]
    assert materialized(table, "scatter-add") == [True]


def test_what_a_comparison_makes_is_kept_for_several_readers():
    def loss(x, w):
        logits = x @ w
        return jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.zeros((32, 1), int), 1).sum()

    program = trace(jax.grad(loss, argnums=(0, 1)), X, W)
    assert materialized(program, "scatter-add") == [True]


def test_an_update_reads_each_tensor_once():
    def step(w, m, g):
        moment = m + g
        return w - g * moment, moment

    program = trace(step, W, W, W)
    (add,), (mul,), (sub,) = (ops(program, name) for name in ("add", "mul", "sub"))
    assert [op.fused & 0b11 for op in (add, mul, sub)] == [0b00, 0b11, 0b10]


def test_what_a_product_stands_between_is_read_again():
    program = trace(lambda x, w: x + jnp.exp(x) @ w, X, W)
    assert ops(program, "exp")[0].fused & 1 == 0
    assert ops(program, "add")[0].fused & 1 == 0


@pytest.mark.parametrize(("config", "kept"), [((0, 1, 1), True), ((0, 32, 0), False)])
def test_a_pad_that_puts_elements_apart_stands_by_itself(config, kept):
    program = trace(lambda x: jnp.sin(lax.pad(jnp.exp(x), jnp.float32(0), (config, (0, 0, 0)))), X)
    assert materialized(program, "pad") == [kept]
    assert materialized(program, "exp") == [kept]


def test_every_level_of_an_associative_scan_is_in_memory():
    program = trace(lambda x: jnp.sin(lax.associative_scan(jnp.add, x)).sum(), X)
    assert set(materialized(program, "pad")) == {True}


def test_what_a_loop_stacks_up_is_in_memory_also_for_one_reader():
    program = trace(lambda x, w: jnp.sin(lax.scan(lambda carry, row: (carry, row @ w), 0.0, x)[1]), X, W)
    assert materialized(program, "scan.exit") == [True]


def test_a_product_is_cut_before_it_is_written():
    program = trace(lambda x, w: (x @ w)[1:], X, W)
    assert materialized(program, "dot_general") == [False]
