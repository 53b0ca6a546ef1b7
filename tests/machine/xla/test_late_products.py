"""Which products run last: those whose gradient the update of its state takes as it is."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.memory.lives import step_memory
from tests.road import trace
from tests.search.descent import W, X, descent, loss


def clipped(weights, x):
    gradients = jax.grad(loss)(weights, x)
    norm = jnp.sqrt(sum(jnp.sum(gradient**2) for gradient in gradients))
    return [weight - gradient / norm for weight, gradient in zip(weights, gradients, strict=True)]


def looped(weights, x):
    return descent([jax.lax.fori_loop(0, 3, lambda _, weight: descent([weight], x)[0], weights[0])], x)


@pytest.mark.parametrize(("step", "expected"), [(descent, 2), (clipped, 0), (looped, 1)])
def test_a_product_runs_last_if_only_an_update_outside_of_loops_reads_it(step, expected):
    program = trace(step, [W, W], X)
    graph, found = program.graph, step_memory(program.graph, program.scopes).gradients
    assert len(found) == expected
    assert all(graph.values[graph.ops[one.op].results[0]].shape == W.shape for one in found)


def test_what_becomes_of_a_gradient_ends_in_the_step_s_results():
    program = trace(descent, [W, W], X)
    found = step_memory(program.graph, program.scopes).gradients
    assert [set(one.made) & set(program.graph.outputs) != set() for one in found] == [True, True]


def test_what_a_product_reads_is_told_apart_from_what_chains_into_it_read():
    program = trace(descent, [W, W], X)
    graph, memory = program.graph, step_memory(program.graph, program.scopes)
    for one in memory.gradients:
        operands = graph.ops[one.op].operands
        assert all(memory.materialized[value] for value in (*one.read, *one.read_inside))
        assert set(one.read) == {value for value in operands if memory.materialized[value]}
        assert not set(one.read_inside) <= set(operands) or not one.read_inside


def test_none_runs_last_on_one_device():
    program = trace(descent, [W, W], X)
    assert step_memory(program.graph, program.scopes, is_split=False).gradients == ()
