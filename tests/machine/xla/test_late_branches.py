"""Products on the shorter one of two branches: which run late on several GPUs, and what lives until then."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.memory.lives import step_memory
from spmdctx.ir.graph import Role
from spmdctx.machine.xla.memory.late_branches import late_branches
from spmdctx.trace.build.build import Argument, build

ROWS, WIDTH = 16, 8


def program_of(fn, *shapes):
    jaxpr = jax.make_jaxpr(fn)(*map(jnp.ones, shapes))
    return build(jaxpr, [Argument("", Role.ARGUMENT)] * len(shapes))


def products(graph):
    return [op.id for op in graph.ops if op.primitive == "dot_general"]


def short_first(x, one, other, last):
    """Both branches begin at x; the second has a product more."""
    short, long = x @ one, jnp.tanh(jnp.tanh(x @ other) @ last)
    return (jnp.sin(short) + long) @ last


def equal(x, one, other, last):
    return (x @ one + x @ other) @ last


def apart(x, one, other, last):
    """The products read other values."""
    return (jnp.sin(x) @ one + jnp.tanh(jnp.cos(x) @ other) @ last) @ last


SHAPES = ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))


def test_the_product_of_the_shorter_branch_waits_for_its_reader():
    graph = program_of(short_first, *SHAPES).graph
    short, long, *_, last = products(graph)
    found = late_branches(graph)
    assert found[short] == last
    assert found.get(long, 0) < last


def in_turn(x, one, other, last):
    """Two products read one weight, but the second one needs what the first one makes."""
    return jnp.tanh(jnp.tanh(jnp.tanh(x @ one) @ other) @ one) @ last


@pytest.mark.parametrize("fn", [apart, in_turn, lambda x, one, other, last: jnp.tanh(x @ one) @ last])
def test_other_products_do_not_wait(fn):
    assert late_branches(program_of(fn, *SHAPES).graph) == {}


@pytest.mark.parametrize("fn", [equal, short_first])
def test_an_op_still_runs_after_what_it_reads(fn):
    program = program_of(fn, *SHAPES)
    graph = program.graph
    runs = step_memory(graph, program.scopes, delays_gradients=True, fuses_into_products=False).runs
    for op in graph.ops:
        for value in op.operands:
            assert value not in graph.producers or runs[graph.producers[value]] <= runs[op.id]


def test_what_the_late_product_reads_lives_until_then_on_several_devices():
    def attend(x, w):
        query, key, value = (x @ w[name] for name in range(3))
        return jnp.sum((jax.nn.softmax(query @ jnp.sin(key).T) @ jnp.tanh(value)) @ w[3])

    program = program_of(jax.grad(attend), (ROWS, WIDTH), (4, WIDTH, WIDTH))
    graph = program.graph

    def most_scores(is_split):
        lives = step_memory(
            graph, program.scopes, is_split=is_split, delays_gradients=True, fuses_into_products=False, fuses_rows=True
        ).lives
        own = [life for life in lives if graph.values[life.value].shape == (ROWS, ROWS)]
        return max(sum(life.start <= at <= life.end for life in own) for at in range(len(graph.ops)))

    assert most_scores(True) == most_scores(False) + 1
