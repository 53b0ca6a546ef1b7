"""Float32 values that are kept in the type of matrix operands."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.cost.memory.lives import step_memory
from spmdctx.ir.graph import item_bytes
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.narrowing import kept_share
from tests.audit.compile_only import need_tpu
from tests.road import trace

X = jnp.ones((32, 64))
W = jnp.ones((64, 64))
WIDE = jnp.ones((64, 128))


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


def halves(function):
    """A function of a product's left and right half, which are as wide as `X`."""
    return lambda x, wide, w: function(*jnp.split(x @ wide, 2, -1), w)


def joined(function):
    """A function of two products that are put together again."""
    return lambda x, wide, w: function(jnp.concatenate([x @ wide[:, :64], jnp.tanh(x @ wide[:, 64:])]), w)


PARTS = {
    "all parts": (halves(lambda left, right, w: left @ w + right @ w.T), ["dot_general"]),
    "one part wide": (halves(lambda left, right, w: left @ w + jnp.sin(right)), []),
    "a part at a place": (lambda x, wide, w: lax.dynamic_slice_in_dim(x @ wide, w[0, 0].astype(int), 64, 1) @ w, ["dot_general"]),
    "put together": (joined(lambda both, w: both @ w), ["dot_general", "tanh"]),
    "put together, wide too": (joined(lambda both, w: (both @ w, both.sum(0))), []),
    "a margin": (lambda x, wide, w: jnp.pad(x @ wide[:, :64], ((8, 8), (0, 0))) @ w, ["dot_general"]),
}


@pytest.mark.parametrize(("function", "kept"), PARTS.values(), ids=PARTS)
def test_parts_for_products_are_written_narrow(function, kept):
    assert narrow(function, X, WIDE, W) == kept


@pytest.mark.parametrize("case", PARTS)
def test_the_compiler_writes_them_as_narrow(case):
    function, kept = PARTS[case]
    device = jax.sharding.SingleDeviceSharding(need_tpu()[0])
    sizes = ((1024, 64), WIDE.shape, W.shape)
    text = jax.jit(function).lower(*(jax.ShapeDtypeStruct(size, "float32", sharding=device) for size in sizes)).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert len(re.findall(r"^ .* = bf16\[1024,\d+\]\S* fusion\(", entry, re.MULTILINE)) == len(kept), entry


def test_values_that_are_narrow_anyway_stay_as_they_are():
    assert narrow(lambda x, w: (x @ w) @ w, X.astype("bfloat16"), W.astype("bfloat16")) == []


def test_only_a_compiler_that_narrows_operands_keeps_values_so():
    program = trace(lambda x, w: (x @ w) @ w, X, W)
    found = step_memory(program.graph, program.scopes).narrow
    value = next(value for value in program.graph.values if found[value.id])
    assert item_bytes(value.dtype) == 4
    assert kept_share(value, found, PRESETS["tpu-v5e"]) == 0.5
    assert kept_share(value, found, PRESETS["h100"]) == 1.0
