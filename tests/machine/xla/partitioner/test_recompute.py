"""Slices of tensors that only exist on the way into other ops are made from slices of their operands."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.lowering.rewrite.constrain import constrain
from spmdctx.machine.xla.partitioner.recompute import is_recomputed, operand_shardings, recomputed_values, refines, sliced_values
from spmdctx.trace.specs import make_mesh
from tests.road import MESH, ops, run, trace

D, M = ("data",), ("model",)
X = jnp.linspace(-1.0, 1.0, 32 * 64).reshape(32, 64)
WHOLE = ((), ())


def sliced(program, assignment, routed=()):
    recomputed = recomputed_values(program.graph, all_to_all=True)
    return sliced_values(program.graph, program.scopes, assignment, recomputed, [((0, value), target) for value, target in routed])


@pytest.mark.parametrize(
    ("source", "target", "want"),
    [
        (WHOLE, (D, M), True),
        ((D, ()), (("data", "model"), ()), True),
        ((D, ()), (("model", "data"), ()), False),
        ((D, ()), ((), D), False),
        ((D, M), (D, ()), False),
    ],
)
def test_a_sharding_refines_another_where_blocks_are_parts_of_blocks(source, target, want):
    assert refines(source, target) is want


def test_a_slice_is_computed_again_where_another_reader_takes_the_whole():
    def step(x):
        hidden = jnp.sin(x)
        return hidden * 2, jnp.cos(hidden)

    program = trace(step, X)
    (sine,), (cosine,), (product,) = (ops(program, name) for name in ("sin", "cos", "mul"))
    assert is_recomputed(sine)
    assert not is_recomputed(cosine)
    found = run(step, X, pins={0: WHOLE, sine: WHOLE, product: WHOLE, cosine: (D, M)})
    found.check()
    closed = constrain(program, found.assignment, MESH, make_mesh(MESH, jax.devices()))
    assert [eqn.primitive.name for eqn in closed.jaxpr.eqns].count("sin") == 2


def test_what_an_op_reads_for_a_slice_leaves_out_dimensions_that_it_repeats():
    (product,) = ops(trace(lambda x, y: x * y, X, X[:1]), "mul")
    assert operand_shardings(product, (D, M)) == ((D, M), ((), M))


def test_what_slices_are_computed_from_stays_as_it_is_for_other_readers():
    def step(x, w):
        total = x @ w + x
        hidden = jnp.sin(total)
        return hidden * 2, jnp.cos(hidden), jnp.tanh(total).sum(0)

    weight = jnp.eye(64)
    program = trace(step, X, weight)
    (total,), (sine,), (cosine,), (double,), (tanh,) = (ops(program, name) for name in ("add", "sin", "cos", "mul", "tanh"))
    assert not is_recomputed(total)
    pins = {0: WHOLE, 1: WHOLE, total: WHOLE, sine: WHOLE, double: WHOLE, cosine: (D, M), tanh: WHOLE}
    found = run(step, X, weight, pins=pins)
    found.check()
    assert sliced(program, found.assignment) == {total.results[0]}
    closed = constrain(program, found.assignment, MESH, make_mesh(MESH, jax.devices()))
    (made,) = (eqn.outvars[0] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "add")
    assert {eqn.primitive.name for eqn in closed.jaxpr.eqns if made in eqn.invars} == {"sharding_constraint"}


@pytest.mark.parametrize(("through", "is_sliced"), [(None, False), (WHOLE, False), (((), M), True)], ids=["none", "as stored", "a slice"])
def test_what_slices_on_the_way_to_a_product_are_computed_from_stays_as_it_is_too(through, is_sliced):
    def step(x, w):
        total = x @ w + x
        return jnp.sin(total) @ w, jnp.tanh(total).sum(0)

    weight = jnp.eye(64)
    program = trace(step, X, weight)
    (total,), (sine,) = ops(program, "add"), ops(program, "sin")
    assignment = run(step, X, weight, pins={0: WHOLE, 1: WHOLE}).assignment
    routed = [] if through is None else [(sine.results[0], through)]
    assert sliced(program, assignment, routed) == ({total.results[0]} if is_sliced else set())


CALLS = {"custom_jvp": jax.nn.relu, "checkpoint": jax.checkpoint(jnp.tanh), "nested": jax.checkpoint(jax.nn.relu)}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("whole_first", [False, True])
def test_what_a_kept_call_makes_is_sliced_as_it_is_stored(call, whole_first):
    """The caller cannot compute it again: whole readers take it from the same constraint."""

    def step(x, w):
        hidden = CALLS[call](x)
        halved = hidden / 2
        results = jnp.sin(halved) @ w, halved @ w
        return results if whole_first else results[::-1]

    weight = jnp.eye(64)
    program = trace(step, X, weight)
    (halved,), (sine,), products = ops(program, "div"), ops(program, "sin"), ops(program, "dot_general")
    pins = {
        0: WHOLE,
        1: WHOLE,
        halved: WHOLE,
        sine: WHOLE,
        products[0 if whole_first else 1]: WHOLE,
        products[1 if whole_first else 0]: (D, ()),
    }
    found = run(step, X, weight, pins=pins)
    found.check()
    (made,) = [value for value in program.graph.ops[halved.id].operands if value >= 0]
    assert sliced(program, found.assignment) == {made}


def test_without_all_to_all_what_repeats_an_operand_is_not_computed_again():
    program = trace(lambda x, y, w: jnp.cos(x * y) @ w, X, X[:1], jnp.eye(64))
    (repeated,), (cosine,) = ops(program, "mul"), ops(program, "cos")
    assert recomputed_values(program.graph, all_to_all=True) == {repeated.results[0], cosine.results[0]}
    assert recomputed_values(program.graph, all_to_all=False) == {cosine.results[0]}


class Net(nnx.Module):
    """A norm, an activation and two dropouts between two layers."""

    def __init__(self, activation, rngs):
        self.activation, self.norm = activation, nnx.BatchNorm(64, rngs=rngs, momentum=0.9)
        self.first, self.last = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)
        self.rows, self.dropout = nnx.Dropout(0.5, rngs=rngs, broadcast_dims=(0,)), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.rows(self.activation(self.norm(self.first(x))))))


@pytest.mark.parametrize("activation", [nnx.relu, nnx.silu], ids=["relu", "silu"])
def test_dropout_read_whole_and_as_a_slice_moves_nothing_that_is_not_planned(activation):
    def step(net, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
        optimizer.update(net, gradients)
        return loss

    net = Net(activation, nnx.Rngs(0, dropout=7))
    optimizer = nnx.Optimizer(net, optax.adamw(1e-2), wrt=nnx.Param)
    parallel = spmdctx.parallel(step, parallel_mode="auto_parallel", dataset_strategy="data_parallel")
    report = parallel.audit(net, optimizer, jnp.ones((64, 32)), jnp.ones((64, 8)))
    assert report.planned_bytes, str(report)
    assert (report.missing, report.unplanned) == ((), ()), str(report)
