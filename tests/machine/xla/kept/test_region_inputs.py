"""What a recomputed region reads is in memory on GPU."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.ir.graph import Role
from spmdctx.machine.presets import CPU, GPU
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.compiled import as_compiled

X, W = jnp.ones((64, 64), "bfloat16"), jnp.ones((64, 64), "bfloat16")


def layer(x, w):
    return jnp.sin(x + x @ w)


def own_loss(x, w, v):
    """The cotangent of the first region is the sum of two cotangents of the second."""
    return jnp.sum(jax.checkpoint(layer)(jax.checkpoint(layer)(x, w), v))


def in_memory(compiler, x):
    jaxpr = jax.make_jaxpr(jax.grad(own_loss, argnums=(1, 2)))(x, W, W)
    program = as_compiled(build(jaxpr, [Argument("", Role.ARGUMENT)] * 3), compiler)
    graph, scopes = program.graph, program.scopes
    found = []
    for op in graph.ops:
        if op.primitive == "add_any" and graph.values[op.results[0]].shape == x.shape:
            borders = any(scopes[reader.id] not in (0, scopes[op.id]) for reader in graph.readers[op.results[0]])
            if borders:
                found.append(not op.fused >> len(op.operands) & 1)
    return found


@pytest.mark.parametrize(("compiler", "wanted"), [(GPU, [True]), (CPU, [False])])
def test_the_sum_of_cotangents_before_a_region_is_one_value(compiler, wanted):
    assert in_memory(compiler, X) == wanted
