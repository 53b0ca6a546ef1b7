"""Which communication can hide: gathers of weights and reductions of gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.errors import ContextError
from spmdctx.ir.graph import Role
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.overlap import overlap_candidates
from tests.road import trace

W, X = jnp.ones((64, 64)), jnp.ones((32, 64))
ROLES = [Role.PARAMETER, Role.BATCH]


def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(x @ w.astype(jnp.bfloat16)) @ w).sum())(w)
    return w - 0.1 * grad, loss


def sides_of(function, *args, roles=ROLES):
    program = trace(function, *args, roles=roles)
    found = overlap_candidates(program.graph)
    return program.graph, found.weights, found.terminal


def test_a_parameter_and_what_only_it_makes_are_weights():
    graph, weights, _ = sides_of(step, W, X)
    assert weights[graph.inputs[0]] == 1
    assert weights[graph.inputs[1]] == 0
    converted = next(op for op in graph.ops if op.primitive == "convert_element_type" and op.operands[0] == graph.inputs[0])
    assert weights[converted.results[0]] == 1
    assert not any(weights[value] for op in graph.ops if op.primitive == "dot_general" for value in op.results)


def test_a_gradient_is_terminal_and_an_activation_is_not():
    graph, _, terminal = sides_of(step, W, X)
    products = [op for op in graph.ops if op.primitive == "dot_general"]
    gradients = [op for op in products if graph.values[op.results[0]].shape == (64, 64)]
    assert gradients
    assert all(terminal[op.results[0]] for op in gradients)
    assert not terminal[products[0].results[0]]
    assert all(terminal[value] for value in graph.outputs)


def test_a_carry_that_the_next_turn_multiplies_is_not_terminal():
    def function(ws, x):
        return lax.scan(lambda carry, w: (carry @ w, carry.sum()), x, ws)

    graph, weights, terminal = sides_of(function, jnp.ones((3, 64, 64)), X)
    inside = next(op for op in graph.ops if op.primitive == "dot_general").results[0]
    assert not terminal[inside]
    assert terminal[next(op for op in graph.ops if op.primitive == "reduce_sum").results[0]]
    assert weights[next(op for op in graph.ops if op.primitive == "scan.enter" and op.operands[0] == graph.inputs[0]).results[0]]


def test_a_carry_that_starts_from_a_weight_and_takes_in_the_batch_is_no_weight():
    def function(w, x):
        return lax.scan(lambda carry, row: (carry + row, None), w, x)[0]

    graph, weights, _ = sides_of(function, jnp.ones((64,)), X)
    assert not any(weights[op.results[0]] for op in graph.ops if op.primitive == "add")


def test_shares_are_the_machine_s():
    graph, *_ = sides_of(step, W, X)
    machine = dataclasses.replace(PRESETS["cpu"], gather_overlap=0.5, reduction_overlap=0.25)
    found = overlap_candidates(graph)
    assert [found.gather_share(value, machine) for value in graph.inputs] == [0.5, 0.0]
    assert found.reduction_share(graph.outputs[0], machine) == 0.25


@pytest.mark.parametrize("field", ["gather_overlap", "reduction_overlap"])
@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_shares_lie_between_nothing_and_all(field, share):
    with pytest.raises(ContextError, match="a share"):
        dataclasses.replace(PRESETS["cpu"], **{field: share})


def test_state_that_comes_out_of_a_loop_as_it_goes_round_is_classified():
    """Its own next value depends on the batch, and it does not, which once went on for ever."""

    def running_mean(mean, x):
        return lax.scan(lambda mean, row: (0.9 * mean + row, None), mean, x)[0]

    program = trace(running_mean, W[0], X, roles=[Role.STATE, Role.BATCH], carried=[(0, 0)])
    found = overlap_candidates(program.graph)
    assert found.weights[program.graph.inputs[0]] == 1
    assert not found.weights[program.graph.outputs[0]]
