"""What is made of a product's result is one fusion with it on TPU, in the plan and in what the compiler makes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from spmdctx.cost.memory.lives import step_memory
from spmdctx.cost.memory.materialized import given_values, materialized_values
from spmdctx.machine.xla.kept.joined_chains import joined_chains
from tests.audit.compile_only import need_tpu
from tests.road import trace

ROWS, WIDTH, HIDDEN = 65536, 256, 2048


def gradients(activation, w, x):
    def layer(w, x):
        return x + activation(x @ w["a"]) @ w["b"]

    return jax.grad(lambda w, x: jnp.sum(jax.checkpoint(layer)(w, x) ** 2), argnums=(0, 1))(w, x)


def arguments(dtype, **how):
    shapes = {"a": (WIDTH, HIDDEN), "b": (HIDDEN, WIDTH)}
    return {name: jax.ShapeDtypeStruct(shape, dtype, **how) for name, shape in shapes.items()}, jax.ShapeDtypeStruct(
        (ROWS, WIDTH), dtype, **how
    )


def joints(function, *args):
    """The primitives that make the values joined chains start with and end in."""
    program = trace(function, *args)
    graph = program.graph
    found = joined_chains(graph, materialized_values(graph, given_values(graph)))
    return [(graph.ops[graph.producers[value]].primitive, graph.ops[graph.producers[joint]].primitive) for value, joint in found.items()]


@pytest.mark.parametrize("activation", [jax.nn.gelu, jnp.tanh], ids=["gelu", "tanh"])
def test_one_tensor_of_the_hidden_layer_is_in_memory_at_its_gradient(activation):
    device = need_tpu("v5p:2x2x1")[0]
    args = arguments("bfloat16", sharding=SingleDeviceSharding(device))
    text = jax.jit(partial(gradients, activation)).lower(*args).compile().as_text()
    hidden = re.escape(f"bf16[{ROWS},{HIDDEN}]")
    entry = text[text.index("ENTRY") :]
    fusions = [line for line in entry.splitlines() if re.search(rf"= .*{hidden}.* fusion\(", line)]
    assert sum(bool(re.search(r'"aliasing_operands":\{"lists":\[\{"indices":\["\d', line)) for line in fusions) == 1
    program = trace(partial(gradients, activation), *arguments("bfloat16"))
    graph, memory = program.graph, step_memory(program.graph, program.scopes)
    large = [life for life in memory.lives if graph.values[life.value].shape == (ROWS, HIDDEN)]
    assert max(sum(life.start <= time <= life.end for life in large) for time in range(len(graph.ops))) == 1


X, W = jnp.ones((32, 64)), jnp.ones((64, 64))


def forked(x, w):
    made = x @ w
    return jnp.sin(made) @ w, jnp.cos(made) @ w


def later(x, w):
    made, other = x @ w, (x + 1) @ w
    joined = jnp.sin(made) * jnp.cos(made) * other
    return joined @ w, jnp.sum(joined)


def joined(x, w):
    made = x @ w
    chain = jnp.sin(made) * jnp.cos(made)
    return chain @ w, jnp.sum(chain)


def spread(x, w):
    made = x @ w
    return jnp.sum(jnp.sin(made) * jnp.cos(made)[0]), made @ w


def read_once(x, w):
    made = x @ w
    return (jnp.sin(made) * jnp.cos(made)) @ w


@pytest.mark.parametrize(
    ("function", "found"),
    [(joined, [("dot_general", "mul")]), (read_once, []), (forked, []), (later, []), (spread, [])],
    ids=["one value", "for one product", "two values", "with a later product", "a row"],
)
def test_only_what_all_goes_through_takes_the_place_of_a_product(function, found):
    assert joints(function, X, W) == found
