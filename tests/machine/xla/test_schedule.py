"""When ops run: weight gradients are put off, state is updated as soon as its gradient is there."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.memory.lives import lives
from spmdctx.machine.xla.schedule import iteration_ends, order
from tests.road import trace

X = jnp.ones((32, 64))
W = jnp.ones((64, 64))


def deep(num_layers, product=jnp.matmul):
    """A step of gradient descent through so many layers."""

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(product(x, weight))
        return x.sum()

    def step(weights, x):
        gradients = jax.grad(loss)(weights, x)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]

    return trace(step, [W] * num_layers, X)


def weight_gradients(graph):
    """The products that make what is [64, 64], and those that make what is [32, 64]."""
    made = [op for op in graph.ops if op.primitive == "dot_general"]
    return [op.id for op in made if graph.values[op.results[0]].shape == (64, 64)], [
        op.id for op in made if graph.values[op.results[0]].shape == (32, 64)
    ]


def passed(graph, runs):
    """Per product that makes a weight's gradient, how many other products it is put off behind."""
    gradients, others = weight_gradients(graph)
    return [sum(place < other <= runs[place] for other in others) for place in gradients]


@pytest.mark.parametrize(("num_layers", "most"), [(1, 0), (2, 1), (3, 2), (12, 2), (20, 4), (40, 6)])
def test_a_gradient_is_put_off_behind_two_or_a_ninth_of_the_other_products(num_layers, most):
    graph = deep(num_layers).graph
    found = passed(graph, order(graph))
    assert max(found) == most
    assert found == sorted(found, reverse=True), "there is nothing left to put the last ones off behind"


def test_nothing_is_put_off_on_one_device():
    graph = deep(12).graph
    assert set(passed(graph, order(graph, is_split=False))) == {0}


def test_state_is_updated_as_soon_as_its_gradient_is_there():
    graph = deep(12).graph
    runs = order(graph)
    gradients, _ = weight_gradients(graph)
    updates = [graph.producers[value] for value in graph.outputs]
    assert updates == sorted(updates, reverse=True) or updates == sorted(updates)
    early = sorted(runs[update] for update in updates)[:-2]
    assert early == sorted(runs[gradient] for gradient in gradients)[:-2], "of the last two nothing is put off, and all else has run"
    assert all(runs[update] >= min(gradients) for update in updates)


def test_what_reads_nothing_is_made_where_it_was_traced():
    def step(table, weight, tokens):
        gradients = jax.grad(lambda table, weight: (jnp.tanh(table[tokens] @ weight) @ weight).sum(), argnums=(0, 1))(table, weight)
        return table - 0.1 * gradients[0], weight - 0.1 * gradients[1]

    graph = trace(step, W, W, jnp.zeros((8,), jnp.int32)).graph
    added = next(op for op in graph.ops if op.primitive == "scatter-add")
    zeros = graph.ops[graph.producers[added.operands[0]]]
    assert zeros.primitive == "broadcast_in_dim"
    assert order(graph)[zeros.id] == zeros.id


def test_a_gradient_is_gone_when_its_state_is_updated():
    program = deep(3)
    graph = program.graph
    gradients, _ = weight_gradients(graph)
    made = {graph.producers[life.value]: life for life in lives(graph, program.scopes) if life.value in graph.producers}
    first = min(gradients)
    held = [life for place, life in made.items() if first <= place < sorted(gradients)[1] and graph.values[life.value].shape == (64, 64)]
    assert all(life.end < sorted(gradients)[1] for life in held)


def test_what_runs_in_a_loop_stays_in_it():
    def step(weights, x):
        def loss(weights):
            return jax.lax.scan(lambda carry, weight: (jnp.tanh(carry @ weight), None), x, weights)[0].sum()

        return weights - 0.1 * jax.grad(loss)(weights)

    graph = trace(step, jnp.ones((12, 64, 64)), X).graph
    runs = order(graph)
    inside = [op.id for op in graph.ops if op.repeats > 1]
    assert inside
    assert [runs[place] for place in inside] == inside


def test_a_step_without_products_runs_as_it_was_traced():
    graph = trace(lambda x: jnp.cumsum(jnp.tanh(jnp.sort(x))) + jnp.sin(x).sum(), jnp.ones(64)).graph
    assert order(graph) == tuple(range(len(graph.ops)))


def test_the_turns_of_nested_loops_end_where_what_they_hand_on_is_ready():
    def inner(x, _):
        return jnp.sort(x @ W), None

    def outer(x, _):
        x, _ = jax.lax.scan(inner, jnp.sin(x), None, length=3)
        return jnp.sort(x) @ W, None

    program = trace(lambda x: jnp.tanh(jax.lax.scan(outer, jnp.exp(x), None, length=2)[0]) @ W, X)
    graph = program.graph
    ends = iteration_ends(graph, program.scopes)
    nexts = [op.id for op in graph.ops if op.primitive == "scan.next"]
    products = [op.id for op in graph.ops if op.primitive == "dot_general"]
    assert len(nexts) == 2
    assert [ends[place] for place in products] == [nexts[0] - 1, nexts[1] - 1, products[2]]
    assert ends[0] == 0
