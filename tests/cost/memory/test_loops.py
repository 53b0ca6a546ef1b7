"""XLA on TPU converts whole stacks before the loops that read narrow slices of them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.cost.memory.lives import step_memory
from tests.road import trace

LAYERS = 6


def scanned(weights, x, dtype="bfloat16"):
    layer = jax.checkpoint(lambda y, one: jnp.tanh(y @ one.astype(dtype)).astype(y.dtype))
    y, _ = lax.scan(lambda y, one: (layer(y, one), None), x, weights)
    return y.astype(jnp.float32).sum()


def both_passes(weights, x):
    return jax.grad(scanned)(weights, x)


def several(weights, xs):
    """Passes of micro-batches."""
    return lax.scan(lambda total, x: (total + both_passes(weights, x), None), jnp.zeros_like(weights), xs)[0]


def found(fn, *shapes, fuses=True):
    program = trace(fn, *shapes)
    graph, memory = program.graph, step_memory(program.graph, program.scopes, fuses_into_products=fuses)
    narrow = [life for life in memory.lives if graph.values[life.value].dtype == "bfloat16" and graph.values[life.value].shape == (8, 8)]
    return graph, [life for life in narrow if not memory.materialized[life.value]]


WEIGHTS, X = jnp.ones((LAYERS, 8, 8)), jnp.ones((4, 8), "bfloat16")


@pytest.mark.parametrize(("fn", "x"), [(scanned, X), (both_passes, X), (several, jnp.ones((3, 4, 8), "bfloat16"))])
def test_narrow_slices_live_from_the_first_loop_to_the_end_of_the_last(fn, x):
    graph, lives = found(fn, WEIGHTS, x)
    loops = [op.id for op in graph.ops if op.primitive.startswith("scan.")]
    assert len(lives) == LAYERS
    (span,) = {(life.start, life.end) for life in lives}
    assert span[0] <= loops[len(loops) // 2]
    assert span[1] >= max(op.id for op in graph.ops if op.primitive.startswith("dot_general"))


def test_slices_that_stay_as_wide_have_no_copies():
    _, lives = found(lambda weights, x: scanned(weights, x, "float32"), WEIGHTS, X)
    assert lives == []


def test_only_tpu_converts_whole_stacks():
    _, lives = found(scanned, WEIGHTS, X, fuses=False)
    assert lives == []
