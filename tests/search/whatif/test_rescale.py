"""A graph with another batch is the graph that tracing with that batch gives."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.ir.graph import LITERAL, Role
from spmdctx.search.whatif.rescale import batch_size, with_batch
from tests.road import trace

ROLES = [Role.PARAMETER, Role.PARAMETER, Role.BATCH]


def mlp(w, v, x):
    def loss(w, v):
        return jnp.mean((jnp.tanh(x @ w) @ v).reshape(x.shape[0] * 2, -1) ** 2)

    gradients = jax.grad(loss, (0, 1))(w, v)
    return w - gradients[0], v - gradients[1]


def scanned(w, v, x):
    def body(carry, _):
        return jnp.sin(carry @ w), carry.sum()

    out, sums = lax.scan(body, x, None, length=3)
    return out @ v, sums


def graph_of(step, size):
    return trace(step, jnp.ones((8, 8)), jnp.ones((8, 4)), jnp.ones((size, 8)), roles=ROLES).graph


@pytest.mark.parametrize("step", [mlp, scanned])
@pytest.mark.parametrize("scale", [Fraction(4), Fraction(1, 2)])
def test_scaling_the_batch_is_tracing_with_another_batch(step, scale):
    scaled, traced = with_batch(graph_of(step, 16), scale), graph_of(step, int(16 * scale))
    alive = sorted({value for op in traced.ops for value in (*op.operands, *op.results) if value != LITERAL})
    assert [scaled.values[value].shape for value in alive] == [traced.values[value].shape for value in alive]
    for own, other in zip(scaled.ops, traced.ops, strict=True):
        assert own.rule.sizes == other.rule.sizes, own.primitive
        assert own.flops == other.flops, own.primitive


def test_ops_of_one_rule_keep_one_rule():
    graph = graph_of(scanned, 16)
    scaled = with_batch(graph, Fraction(2))
    groups = {}
    for old, new in zip(graph.ops, scaled.ops, strict=True):
        groups.setdefault(id(old.rule), set()).add(id(new.rule))
    assert all(len(rules) == 1 for rules in groups.values())


def test_a_batch_that_does_not_divide_is_none():
    assert with_batch(graph_of(mlp, 2), Fraction(1, 4)) is None


def test_a_slice_of_the_batch_keeps_its_size():
    scaled, traced = (trace(lambda x: x[:5].sum(), jnp.ones((size, 8)), roles=[Role.BATCH]).graph for size in (16, 32))
    assert [value.shape for value in with_batch(scaled, Fraction(2)).values] == [value.shape for value in traced.values]


def test_a_batch_against_itself_is_scaled_twice():
    def scores(x):
        return (x @ x.T).sum()

    scaled, traced = (trace(scores, jnp.ones((size, 8)), roles=[Role.BATCH]).graph for size in (16, 32))
    scaled = with_batch(scaled, Fraction(2))
    assert [value.shape for value in scaled.values] == [value.shape for value in traced.values]
    assert [op.flops for op in scaled.ops] == [op.flops for op in traced.ops]


def test_a_step_without_a_batch_has_none():
    graph = trace(lambda x: x + 1, jnp.ones(4), roles=[Role.PARAMETER]).graph
    assert with_batch(graph, Fraction(2)) is None
    assert batch_size(graph) == 0


def test_the_size_of_the_batch_is_that_of_its_first_leaf():
    assert batch_size(graph_of(mlp, 16)) == 16
