"""Slices of tensors that only exist on the way into other ops are made from slices of their operands."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.lowering.rewrite.constrain import constrain
from spmdctx.machine.xla.partitioner.recompute import is_recomputed, operand_shardings, refines, sliced_values
from spmdctx.trace.specs import make_mesh
from tests.road import MESH, ops, run, trace

D, M = ("data",), ("model",)
X = jnp.linspace(-1.0, 1.0, 32 * 64).reshape(32, 64)
WHOLE = ((), ())


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
    assert sliced_values(program.graph.ops, found.assignment) == {total.results[0]}
    closed = constrain(program, found.assignment, MESH, make_mesh(MESH, jax.devices()))
    (made,) = (eqn.outvars[0] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "add")
    assert {eqn.primitive.name for eqn in closed.jaxpr.eqns if made in eqn.invars} == {"sharding_constraint"}


@pytest.mark.parametrize(("through", "sliced"), [(None, False), (WHOLE, False), (((), M), True)], ids=["none", "as stored", "a slice"])
def test_what_slices_on_the_way_to_a_product_are_computed_from_stays_as_it_is_too(through, sliced):
    def step(x, w):
        total = x @ w + x
        return jnp.sin(total) @ w, jnp.tanh(total).sum(0)

    weight = jnp.eye(64)
    program = trace(step, X, weight)
    (total,), (sine,) = ops(program, "add"), ops(program, "sin")
    assignment = run(step, X, weight, pins={0: WHOLE, 1: WHOLE}).assignment
    routed = [] if through is None else [(sine.results[0], through)]
    assert sliced_values(program.graph.ops, assignment, routed) == ({total.results[0]} if sliced else set())
