"""Copies of what loops read on GPU: slices for products, stacks that get another layout, and spread constants."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.memory.lives import step_memory
from spmdctx.ir.graph import Role
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.memory.loop_copies import loop_reads
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.compiled import as_compiled

STEPS, BATCH, SEQ, HEADS, WIDTH = 3, 2, 8, 4, 16


def program_of(body, x_shape, *stacks):
    def fn(x, *stacks):
        return jax.lax.scan(body, x, stacks)[0]

    jaxpr = jax.make_jaxpr(fn)(jnp.ones(x_shape), *map(jnp.ones, stacks))
    return build(jaxpr, [Argument("", Role.ARGUMENT)] * (1 + len(stacks)))


def reads_of(program, *, is_split=False):
    graph = program.graph
    carried = dict(graph.ties)
    materialized = step_memory(graph, program.scopes, fuses_into_products=False).materialized
    return {read.value: read for read in loop_reads(graph, materialized, carried, is_split=is_split)}


def dense(x, own):
    return jnp.tanh(x @ own[0]), None


def heads_inside(x, own):
    """The batch of the product is the first and the third dim of the stack's slice."""
    return x + jnp.einsum("bhqk,bkhd->bhqd", x @ x.swapaxes(2, 3), own[0]), None


def heads_outside(x, own):
    return x + jnp.einsum("bhqk,bhkd->bhqd", x @ x.swapaxes(2, 3), own[0]), None


INSIDE, OUTSIDE = (STEPS, BATCH, SEQ, HEADS, WIDTH), (STEPS, BATCH, HEADS, SEQ, WIDTH)
X = (BATCH, HEADS, SEQ, WIDTH)


def test_the_slice_that_a_product_reads_is_there_while_it_runs():
    program = program_of(dense, (SEQ, WIDTH), (STEPS, WIDTH, WIDTH))
    graph = program.graph
    read = reads_of(program)[graph.inputs[1]]
    assert read.is_sliced
    assert not read.is_copied
    (product,) = read.products
    more = step_memory(graph, program.scopes, is_split=False, delays_gradients=True, fuses_into_products=False).lives
    plain = step_memory(graph, program.scopes, is_split=False, fuses_into_products=False).lives
    assert [life for life in more if life not in plain] == [(read.slice, product, product)]


def test_a_slice_that_no_product_reads_is_made_on_the_way():
    program = program_of(lambda x, own: (jnp.tanh(x + own[0]), None), (SEQ, WIDTH), (STEPS, SEQ, WIDTH))
    assert reads_of(program) == {}


@pytest.mark.parametrize(("body", "stack", "is_copied"), [(heads_inside, INSIDE, True), (heads_outside, OUTSIDE, False)])
def test_a_stack_is_copied_where_a_product_wants_its_batch_outermost(body, stack, is_copied):
    program = program_of(body, X, stack)
    graph = program.graph
    assert reads_of(program)[graph.inputs[1]].is_copied == is_copied
    lives = step_memory(graph, program.scopes, is_split=False, delays_gradients=True, fuses_into_products=False).lives
    assert sum(life.value == graph.inputs[1] for life in lives) == 1 + is_copied


def test_dims_of_one_element_may_stand_anywhere():
    assert not reads_of(program_of(heads_inside, (1, HEADS, 1, WIDTH), (STEPS, 1, 1, HEADS, WIDTH)))[1].is_copied


def test_what_a_loop_stacks_up_is_there_before_it_is_added():
    def fn(x, total):
        return total + jax.lax.scan(lambda x, _: (jnp.sin(x), jnp.cos(x)), x, None, length=STEPS)[1]

    jaxpr = jax.make_jaxpr(fn)(jnp.ones((SEQ, WIDTH)), jnp.ones((STEPS, SEQ, WIDTH)))
    program = as_compiled(build(jaxpr, [Argument("", Role.ARGUMENT)] * 2), PRESETS["h100"].compiler)
    graph = program.graph
    (stack,) = [op.results[0] for op in graph.ops if op.primitive == "scan.exit"]
    first, last = graph.ops[0].id, graph.producers[graph.outputs[0]]
    on_gpu = step_memory(graph, program.scopes, delays_gradients=True, fuses_into_products=False).lives
    (life,) = [life for life in on_gpu if life.value == stack]
    assert (life.start, life.end) in ((first, last), (first, last - 1))
    assert stack not in {life.value for life in step_memory(graph, program.scopes, fuses_into_products=False).lives}


@pytest.mark.parametrize("is_split", [True, False])
def test_a_spread_constant_enters_a_loop_from_memory_on_one_device(is_split):
    def fn(x):
        mask = jnp.full((SEQ, WIDTH), -1e9)
        return jax.lax.fori_loop(0, STEPS, lambda _, one: jnp.where(one > 0, one * 2.0, mask), x)

    jaxpr = jax.make_jaxpr(fn)(jnp.ones((SEQ, WIDTH)))
    found = reads_of(build(jaxpr, [Argument("", Role.ARGUMENT)]), is_split=is_split)
    assert [read.is_copied for read in found.values()] == ([] if is_split else [True])
