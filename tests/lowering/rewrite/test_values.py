"""One record per value says what is written where it is made and where it is read."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from spmdctx.cost.price.directives import Directives, completed
from spmdctx.cost.price.gradients import BucketedGradients
from spmdctx.lowering.rewrite.values import NO_RECORD, ShardedProgram, Values
from spmdctx.trace.specs import make_mesh
from tests.road import MESH, ops, spread, trace

ROWS, COLUMNS = (("data",), ()), ((), ("data",))


def function(x, w):
    """A product that is reduced, and one that reads its operand otherwise than it is stored."""
    return jnp.tanh(x @ w), x.T


def values(directives, pins):
    program = trace(function, jnp.ones((16, 32)), jnp.ones((32, 8)))
    assignment = spread(program, pins)
    full = completed(directives, program.graph, program.scopes, assignment, MESH)
    return program, Values(ShardedProgram(program, assignment, MESH, make_mesh(MESH, jax.devices()), full))


def test_a_value_of_which_nothing_is_said_has_the_empty_record():
    program, found = values(Directives(), {})
    assert found[program.graph.inputs[1]] == NO_RECORD


def test_values_alike_share_one_record():
    program, found = values(Directives(), {})
    first, second = program.graph.inputs
    assert found[first] is found[second]


def test_a_barrier_stands_behind_what_is_kept_apart_or_written_once():
    program = trace(function, jnp.ones((16, 32)), jnp.ones((32, 8)))
    (product,), (tanh,) = ops(program, "dot_general"), ops(program, "tanh")
    directives = Directives(unfused_updates={product.id: product.results[0]}, written_once=frozenset(tanh.results))
    _, found = values(directives, {})
    assert found[product.results[0]].has_barrier
    assert found[tanh.results[0]].has_barrier
    assert not found[program.graph.inputs[0]].has_barrier


def test_what_one_reader_takes_otherwise_is_moved():
    program = trace(function, jnp.ones((16, 32)), jnp.ones((32, 8)))
    (product,) = ops(program, "dot_general")
    _, found = values(Directives(), {0: ROWS, product: ((), ("data",)), 1: ((), ("data",))})
    assert found[program.graph.inputs[0]].is_moved


def test_a_sum_in_a_bucket_is_grouped_and_numbered():
    program = trace(function, jnp.ones((16, 32)), jnp.ones((32, 8)))
    (product,) = ops(program, "dot_general")
    directives = replace(Directives(), gradients=BucketedGradients((), (), {product.results[0]: 3}))
    _, found = values(directives, {0: COLUMNS})
    assert found[product.results[0]].is_grouped
    assert found.bucket(product.results[0]) == 3
    assert found.bucket(program.graph.inputs[0]) is None
