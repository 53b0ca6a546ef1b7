"""Updates that run right behind the product that makes their gradient."""

import jax
import numpy as np
import pytest

from spmdctx.cost.memory.copies import Copies
from spmdctx.cost.memory.early_updates import Late, early_updates
from spmdctx.cost.memory.lives import step_memory
from tests.road import trace
from tests.search.descent import W, X, descent, loss


def shared(weights, x):
    """One weight is used twice: its gradient needs the whole backward pass."""
    gradient = jax.grad(lambda weight: loss([weight, weight], x))(weights[0])
    return [weights[0] - 0.1 * gradient]


def scaled(weights, x):
    """An update that waits for all gradients."""
    gradients = jax.grad(loss)(weights, x)
    size = sum((gradient**2).sum() for gradient in gradients)
    return [weight - 0.1 * gradient / size for weight, gradient in zip(weights, gradients, strict=True)]


def found(function, *weights, late_bytes=100, early_bytes=50, waits=True, fuses=True):
    """The updates found where the peak has `late_bytes` until the last layer's update is early, and which ops make their gradients."""
    program = trace(function, list(weights), X)
    graph = program.graph
    memory = step_memory(graph, program.scopes)
    products = {one.op: one for one in memory.gradients}
    last = next(iter(products), None)

    def alive_with(late):
        return np.array([10, late_bytes if last in late else early_bytes])

    late = Late(
        products, alive_with(products), alive_with, lambda left, time: dict.fromkeys(left, (time == 1) * waits * 40), lambda op: fuses
    )
    return graph, products, early_updates(graph, program.scopes, memory, late)


def test_all_that_reads_the_next_layers_gradient_waits_for_the_new_weight():
    graph, products, (updates, alive) = found(descent, W, W)
    last, first = products
    (update,) = updates
    assert update.op == last
    assert update.results == (graph.outputs[1],)
    gate = graph.ops[graph.producers[update.gate]]
    assert gate.primitive == "dot_general"
    assert gate.id < first
    assert alive.tolist() == [10, 50]


def test_of_the_first_layer_nothing_can_wait():
    _, products, (updates, _) = found(descent, W, W, W)
    assert len(products) == 3
    assert len(updates) == 2


@pytest.mark.parametrize(("early_bytes", "number"), [(83, 1), (84, 0), (100, 0)])
def test_nothing_waits_for_less_than_a_sixth_of_the_peak(early_bytes, number):
    _, _, (updates, alive) = found(descent, W, W, early_bytes=early_bytes)
    assert len(updates) == number
    assert alive.max() == (early_bytes if number else 100)


def test_what_is_kept_apart_from_its_update_stays_where_it_is():
    assert found(descent, W, W, fuses=False)[2][0] == ()


def test_what_keeps_nothing_alive_at_the_peak_stays_where_it_is():
    assert found(descent, W, W, waits=False)[2][0] == ()


@pytest.mark.parametrize("function", [shared, scaled])
def test_an_update_that_needs_later_gradients_is_not_early(function):
    assert found(function, W, W)[2][0] == ()


def test_an_update_that_needs_what_the_gate_makes_is_not_early():
    def slowed(weights, x):
        gradients, at = jax.grad(loss, argnums=(0, 1))(weights, x)
        return [weight - at[0, 0] * gradient for weight, gradient in zip(weights, gradients, strict=True)]

    _, products, (updates, _) = found(slowed, W, W)
    assert len(products) == 3
    assert updates == ()


def test_what_waits_keeps_alive_what_it_reads_beyond_its_life():
    program = trace(descent, [W, W], X)
    graph = program.graph
    memory = step_memory(graph, program.scopes)
    product = memory.gradients[0]
    copies = Copies(graph, memory)
    copies.make(graph.ops[product.op], graph.ops[product.op].operands[0], "copy", 7, gathered=False)
    sizes, ends = [1000 + value for value in range(len(graph.values))], {life.value: life.end for life in memory.lives}
    last = len(graph.ops) - 1
    kept = [value for value in (*product.read, *product.read_inside) if ends[value] < last]
    assert kept
    assert copies.waiting(sizes, {product.op: product}, last) == {product.op: sum(1000 + value for value in kept) + 7}
    assert copies.waiting(sizes, {product.op: product}, 0) == {product.op: 0}
