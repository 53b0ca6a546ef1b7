"""Element-wise values of one convolution's result are made at once on GPU, if none of them needs another."""

import functools

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.memory.lives import step_memory
from spmdctx.ir.graph import Role
from spmdctx.machine.presets import GPU
from spmdctx.machine.xla.memory.siblings import sibling_runs
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.compiled import as_compiled
from tests.machine.xla.test_library_results import IMAGES, KERNEL, convolved, multiplied


def layer(product, x, weights):
    return x + product(jax.nn.relu(product(x, weights[0])), weights[1])


def gradient_of(product, *, remat):
    def loss(weights, x):
        own = functools.partial(layer, product)
        return ((jax.checkpoint(own) if remat else own)(x, weights) ** 2).sum()

    weights = [jnp.ones(KERNEL)] * 2
    jaxpr = jax.make_jaxpr(jax.grad(loss))(weights, jnp.ones(IMAGES))
    return as_compiled(build(jaxpr, [Argument("", Role.ARGUMENT)] * 3), GPU)


def test_a_recomputed_value_is_rectified_when_its_cotangent_is():
    program = gradient_of(convolved, remat=True)
    graph, runs = program.graph, sibling_runs(program.graph)
    ((first, last),) = runs.items()
    assert [graph.ops[index].primitive for index in (first, last)] == ["max", "select_n"]
    memory = step_memory(graph, program.scopes, is_split=False, fuses_into_products=False, delays_gradients=True, fuses_rows=True)
    assert memory.runs[first] == last
    here = [life for life in memory.lives if life.start <= last <= life.end and graph.values[life.value].shape == IMAGES]
    # The argument, the cotangent that entered, the convolution's result and its cotangent, and what is made of both.
    assert len(here) == 6


@pytest.mark.parametrize(("product", "remat"), [(convolved, False), (multiplied, True)])
def test_what_needs_the_other_value_or_a_product_makes_is_not(product, remat):
    assert sibling_runs(gradient_of(product, remat=remat).graph) == {}
