"""What a convolution has made on GPU is not written over."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.memory.lives import step_memory
from spmdctx.ir.graph import Role
from spmdctx.machine.presets import GPU
from spmdctx.machine.xla.memory.library_results import handed_out
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.compiled import as_compiled

IMAGES, KERNEL = (4, 8, 8, 16), (3, 3, 16, 16)


def convolved(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def multiplied(x, w):
    return x @ w[0, 0]


def most_alive(product, *, fuses_rows):
    """Returns the most images made in the step that are alive at once."""
    jaxpr = jax.make_jaxpr(lambda x, w: product(jnp.tanh(product(x, w)), w)[:, :1])(jnp.ones(IMAGES), jnp.ones(KERNEL))
    program = as_compiled(build(jaxpr, [Argument("", Role.ARGUMENT)] * 2), GPU)
    graph, memory = program.graph, step_memory(program.graph, program.scopes, fuses_into_products=False, fuses_rows=fuses_rows)
    own = [life for life in memory.lives if life.value not in graph.inputs and graph.values[life.value].shape == IMAGES]
    made = [op.id for op in graph.ops if op.primitive == "tanh"]
    assert len(handed_out(graph)) == (2 if product is convolved else 0)
    return max(sum(life.start <= at <= life.end for life in own) for at in made)


@pytest.mark.parametrize(("product", "beside"), [(convolved, 2), (multiplied, 1)])
def test_an_op_writes_beside_what_a_library_made(product, beside):
    assert most_alive(product, fuses_rows=True) == beside
    assert most_alive(product, fuses_rows=False) == 1
