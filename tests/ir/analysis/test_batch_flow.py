"""Rows of a batch are followed around loops until nothing changes, and that ends."""

import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.ir.analysis.batch_flow import FlowKind, follow
from tests.road import trace

X = jnp.ones((8, 4))


def statistic_enters_rows(x):
    return lax.fori_loop(0, 3, lambda _, c: c + jnp.max(x), x)


def sum_becomes_a_product(x):
    return lax.scan(lambda c, _: (c * x.sum(), None), x.sum(), None, length=3)[0]


def statistic_and_sum(x):
    return lax.scan(lambda c, _: (c * jnp.max(x) + c, None), x.mean(), None, length=3)[0]


def two_carries_change_places(x):
    return lax.fori_loop(0, 3, lambda _, c: (c[1], c[0]), (x.sum(), x.max()))[0]


def nested_loops(x):
    def inner(_, c):
        return c + x.max() * x.sum()

    return lax.scan(lambda c, _: (lax.fori_loop(0, 2, inner, c), None), x.sum(), None, length=2)[0]


def rows_alone(x):
    return lax.fori_loop(0, 3, lambda _, c: c * 2, x)


def sums_alone(x):
    return lax.scan(lambda c, _: (c + x.sum(), None), x.sum(), None, length=3)[0]


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (statistic_enters_rows, FlowKind.ROWS),
        (sum_becomes_a_product, FlowKind.STATISTIC),
        (statistic_and_sum, FlowKind.SUM),
        (two_carries_change_places, FlowKind.STATISTIC),
        (nested_loops, FlowKind.SUM),
        (rows_alone, FlowKind.ROWS),
        (sums_alone, FlowKind.SUM),
    ],
)
def test_loops_are_followed_until_nothing_changes(fn, kind):
    graph = trace(fn, X).graph
    flows = follow(graph, graph.ops, {graph.inputs[0]: 0})
    assert flows[graph.outputs[0]].kind is kind


EXPERTS, SIZES = jnp.ones((2, 4, 3)), jnp.array([5, 3], jnp.int32)


def grouped_by_all_rows(x):
    return lax.ragged_dot(x, EXPERTS, SIZES).sum()


def grouped_by_their_own(x):
    first = (x[:, 0] > 0).sum(dtype=jnp.int32)
    return lax.ragged_dot(x, EXPERTS, jnp.stack([first, len(x) - first])).sum()


def tokens_grouped_within_each_row(x):
    product = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), [1], [1])
    rows = jnp.broadcast_to(x[:, None], (8, 8, 4))
    return lax.ragged_dot_general(rows, jnp.broadcast_to(EXPERTS, (8, 2, 4, 3)), jnp.broadcast_to(SIZES, (8, 2)), product).sum()


@pytest.mark.parametrize(
    ("fn", "kind"),
    [(grouped_by_all_rows, FlowKind.LOST), (grouped_by_their_own, FlowKind.SUM), (tokens_grouped_within_each_row, FlowKind.SUM)],
)
def test_rows_are_lost_where_their_place_among_all_rows_chooses_a_group(fn, kind):
    graph = trace(fn, X).graph
    flows = follow(graph, graph.ops, {graph.inputs[0]: 0})
    assert flows[graph.outputs[0]].kind is kind
