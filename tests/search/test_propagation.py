"""Propagation: pins spread forwards, backwards and through loops, conflicts go to the cheaper side."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.ir.graph import LITERAL
from spmdctx.ir.mesh import LogicalMesh, divides
from spmdctx.rules.builder import RuleBuilder, identity
from spmdctx.search.problem.space import Space
from spmdctx.search.propagation import propagate
from tests.road import CPU, MESH, bill_of, ops, spread, trace
from tests.search.graphs import GraphMaker

D, M = ("data",), ("model",)
X = jnp.ones((32, 64))
W = jnp.ones((64, 64))
STACK = jnp.ones((3, 64, 64))


def chain(length, shape=(32, 64)):
    """A hand-made chain of element-wise ops; returns the graph."""
    make = GraphMaker()
    value = make.input(*shape)
    for _ in range(length):
        value = make.op("sin", identity(shape), value, shape=shape)
    return make.graph(value)


def assigned(graph, pins, seeds=None, forced=None, from_literals=frozenset(), mesh=MESH):
    return propagate(Space(graph, mesh, CPU, from_literals), pins, forced or {}, seeds or {})


def kinds(program, assignment):
    return [(row.kind, row.axes, row.payload_bytes) for row in bill_of(program, assignment).collectives]


def test_without_pins_nothing_is_split():
    program = trace(lambda x, w: jnp.tanh(x @ w), X, W)
    assignment = spread(program, {})
    assert not any(axes for sharding in assignment.values for axes in sharding)
    assert kinds(program, assignment) == []


@pytest.mark.parametrize("pinned", [0, 3, 6], ids=["first", "middle", "last"])
def test_a_pin_spreads_along_a_chain_from_wherever_it_is(pinned):
    assignment = assigned(chain(6), {pinned: (D, M)})
    assert set(assignment.values) == {(D, M)}
    assert {choice.axes for choice in assignment.ops} == {(D, M)}


def test_two_pins_meet_on_one_value():
    make = GraphMaker()
    left, right = make.input(32, 64), make.input(32, 64)
    both = make.op("add", identity((32, 64), num_operands=2), left, right, shape=(32, 64))
    assignment = assigned(make.graph(both), {left: (D, ()), right: ((), M)})
    assert assignment.values == ((D, ()), ((), M), (D, M))
    assert assignment.ops[0].axes == (D, M)


def test_pins_stay_where_they_are_put():
    graph = chain(4)
    assignment = assigned(graph, {0: (D, ()), 2: ((), ()), 4: ((), D)})
    assert [assignment.values[value] for value in (0, 2, 4)] == [(D, ()), ((), ()), ((), D)]


def test_a_seed_spreads_and_yields_to_a_pin():
    graph = chain(4)
    assert set(assigned(graph, {}, seeds={2: (D, ())}).values) == {(D, ())}
    assert assigned(graph, {0: ((), M)}, seeds={0: (D, ())}).values[0] == ((), M)


def test_a_forced_op_keeps_its_axes_and_splits_its_neighbours():
    graph = chain(3)
    assignment = assigned(graph, {}, forced={1: (D, M)})
    assert assignment.ops[1].axes == (D, M)
    assert set(assignment.values) == {(D, M)}


def test_a_value_follows_the_dearer_of_two_readers():
    make = GraphMaker()
    start = make.input(32, 64)
    shared = make.op("sin", identity((32, 64)), start, shape=(32, 64))
    once = make.op("cos", identity((32, 64)), shared, shape=(32, 64))
    often = make.op("tan", identity((32, 64)), shared, shape=(32, 64), repeats=50)
    graph = make.graph(once, often)
    assert assigned(graph, {start: ((), D), once: ((), D), often: (D, ())}).values[shared] == (D, ())
    assert assigned(graph, {start: (D, ()), once: (D, ()), often: ((), D)}).values[shared] == ((), D)


def test_tied_values_have_one_sharding():
    make = GraphMaker()
    start = make.input(32, 64)
    end = make.op("sin", identity((32, 64)), start, shape=(32, 64))
    other = make.op("cos", identity((32, 64)), start, shape=(32, 64))
    graph = make.graph(end, other, ties=[(start, end), (other, end)])
    assert set(assigned(graph, {other: (D, M)}).values) == {(D, M)}


@pytest.mark.parametrize(("other", "agreed"), [((D, M), (D, M)), ((M, D), ((), ())), ((D, ()), (D, M))], ids=["same", "crossed", "part"])
def test_a_value_from_literals_takes_what_all_its_readers_want(other, agreed):
    make = GraphMaker()
    left, right = make.input(32, 64), make.input(32, 64)
    zeros = make.op("broadcast_in_dim", RuleBuilder().build([[]], [[(), ()]]), LITERAL, shape=(32, 64))
    rule = identity((32, 64), num_operands=2)
    sums = [make.op("add", rule, value, zeros, shape=(32, 64)) for value in (left, right)]
    graph = make.graph(*sums)
    assert assigned(graph, {left: (D, M), right: other}, from_literals=frozenset({zeros})).values[zeros] == agreed


def test_a_blocked_dimension_is_never_split():
    program = trace(lambda x: lax.slice(x, (1, 0), (32, 64)), X)
    assignment = spread(program, {0: (D, M)})
    assert assignment.values[program.graph.outputs[0]] == ((), M)
    assert kinds(program, assignment) == [("all_gather", D, 32 * 64 * 4 // 2)]


def test_the_batch_splits_a_training_step_and_costs_one_all_reduce_per_weight():
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - 0.1 * grad, loss

    program = trace(step, W, X, carried=[(0, 0)])
    assignment = spread(program, {0: ((), ()), 1: (("data", "model"), ())})
    assert sorted(kinds(program, assignment)) == [
        ("all_reduce", ("data", "model"), 4),
        ("all_reduce", ("data", "model"), 64 * 64 * 4),
    ]


def test_megatrons_column_and_row_split_costs_one_all_reduce():
    program = trace(lambda x, up, down: jnp.tanh(x @ up) @ down, X, W, W)
    assignment = spread(program, {0: (D, ()), 1: ((), M)})
    assert assignment.values[program.graph.inputs[2]] == (M, ())
    assert assignment.values[program.graph.outputs[0]] == (D, ())
    assert kinds(program, assignment) == [("all_reduce", M, 32 * 64 * 4 // 4)]


def test_a_pin_reaches_through_a_scan_its_gradient_and_its_optimizer():
    def step(stack, momentum, x):
        def loss(stack):
            return lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, stack)[0].sum()

        momentum = 0.9 * momentum + jax.grad(loss)(stack)
        return stack - momentum, momentum

    program = trace(step, STACK, STACK, X, carried=[(0, 0), (1, 1)])
    assignment = spread(program, {0: ((), (), M), 2: (D, ())})
    assert [assignment.values[value] for value in program.graph.inputs] == [((), (), M), ((), (), M), (D, ())]
    assert [assignment.values[value] for value in program.graph.outputs] == [((), (), M)] * 2


def test_what_enters_a_loop_is_resharded_once_outside_of_it():
    program = trace(lambda x, stack: lax.scan(lambda c, w: (c + w[:32], None), x, stack)[0], X, STACK)
    inside = ops(program, "scan.enter")[1]
    assignment = spread(program, {1: ((), M, ()), inside: ((), M)})
    (row,) = bill_of(program, assignment).collectives[:1]
    assert (row.kind, row.repeats, row.payload_bytes) == ("all_to_all", 1, 3 * 64 * 64 * 4 // 2)


@pytest.mark.parametrize("shape", [(30, 64), (32, 63)], ids=["rows", "columns"])
def test_every_sharding_divides_its_value(shape):
    program = trace(lambda x, w: (jnp.tanh(x @ w).T, x.sum(0)), jnp.ones(shape), jnp.ones((shape[1], 64)))
    assignment = spread(program, {1: ((), M)}, seeds={program.graph.inputs[0]: ((), ())})
    for value, sharding in zip(program.graph.values, assignment.values, strict=True):
        assert divides(value.shape, sharding, MESH)


def test_no_value_and_no_op_uses_an_axis_twice():
    program = trace(lambda x, w: jnp.tanh(x @ w) @ w.T @ w, X, W)
    assignment = spread(program, {0: (D, M), 1: (D, M)})
    for sharding in (*assignment.values, *(choice.axes for choice in assignment.ops)):
        used = [name for axes in sharding for name in axes]
        assert len(used) == len(set(used))


def test_an_axis_of_one_device_changes_nothing():
    program = trace(lambda x, w: jnp.tanh(x @ w), X, W)
    mesh = LogicalMesh.of({"data": 8, "model": 1})
    assignment = spread(program, {0: (D, M), 1: ((), M)}, mesh)
    assert bill_of(program, assignment, mesh).communication_s == 0.0
