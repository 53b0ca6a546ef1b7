"""Results that the partitioner can only split as planned carry no constraint."""

import jax.numpy as jnp
import pytest

from spmdctx.machine.xla.partitioner.needed_constraints import NeededConstraints
from tests.road import MESH, ops, spread, trace

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
