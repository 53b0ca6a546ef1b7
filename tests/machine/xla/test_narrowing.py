"""Float32 values that are kept in the type of matrix operands."""

import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.cost.memory.lives import step_memory
from spmdctx.ir.graph import item_bytes
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.narrowing import kept_share
from tests.road import trace

X = jnp.ones((32, 64))
W = jnp.ones((64, 64))


def narrow(function, *args):
    """The primitives whose results are kept narrow."""
    program = trace(function, *args)
    graph = program.graph
    found = step_memory(graph, program.scopes).narrow
    return [graph.ops[graph.producers[value]].primitive for value in range(len(graph.values)) if found[value]]


def looked_up(x):
    return x.at[jnp.zeros(16, int)].get(mode="promise_in_bounds")


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x, w: (x @ w) @ w, ["dot_general"]),
        (lambda x, w: jnp.tanh(x @ w) @ w, ["tanh"]),
        (lambda x, w: (x @ w).T @ (jnp.tanh(x) @ w), ["transpose", "dot_general"]),
        (lambda x, w: lax.sort(x @ w) @ w, []),
        (lambda x, w: lax.sort(x) @ w, []),
        (lambda x, w: (lambda y: (y @ w, y))(x @ w), []),
        (lambda x, w: (lambda y: (jnp.tanh(y) @ w) + (jnp.exp(y) @ w))(x @ w), []),
        (lambda x, w: (lambda y: (jnp.tanh(y) * jnp.exp(y)) @ w)(x @ w), ["dot_general"]),
        (lambda x, w: (lambda y: lax.sort(jnp.tanh(y) * jnp.exp(y)))(x @ w), []),
        (lambda x, w: looked_up(x) @ w, ["gather"]),
        (lambda x, w: (lambda y: (y @ w, jnp.sin(y)))(looked_up(x)), []),
        (lambda x, w: (lambda y: (y @ w, y @ w.T))(lax.scan(lambda carry, row: (carry, row @ w), 0.0, x)[1]), ["scan.exit"]),
    ],
    ids=[
        *("read by a product", "behind a chain", "layouts too", "sorted", "no product", "returned", "two chains", "one end", "another end"),
        *("looked up", "looked up for others, too", "stacked"),
    ],
)
def test_what_a_product_makes_for_products_alone_is_narrow(function, kept):
    assert narrow(function, X, W) == kept


def test_values_that_are_narrow_anyway_stay_as_they_are():
    assert narrow(lambda x, w: (x @ w) @ w, X.astype("bfloat16"), W.astype("bfloat16")) == []


def test_only_a_compiler_that_narrows_operands_keeps_values_so():
    program = trace(lambda x, w: (x @ w) @ w, X, W)
    found = step_memory(program.graph, program.scopes).narrow
    value = next(value for value in program.graph.values if found[value.id])
    assert item_bytes(value.dtype) == 4
    assert kept_share(value, found, PRESETS["tpu-v5e"]) == 0.5
    assert kept_share(value, found, PRESETS["h100"]) == 1.0
