"""Gradients that are not reduced are kept apart from the update of the state, where the chip could not hold an operand for both."""

import re

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.price.directives import Directives
from spmdctx.lowering.compile import jit_program
from spmdctx.machine.xla.update_fusion import unfused_updates
from tests.audit.compile_only import need_tpu
from tests.road import MESH, spread, trace

X, Y, STATE = jnp.ones((32, 64)), jnp.ones((32, 16)), jnp.ones((64, 16))
WHOLE, COLUMNS = ((), ()), ((), ("data", "model"))
SMALLER = 32 * 16 * 4 // 8
"""Bytes of a device's block of the smaller operand."""


def momentum(x, y, moment):
    """A gradient, transposed as JAX does it, added to a moment."""
    return 0.9 * moment + jax.lax.dot_general(y, x, (((0,), (0,)), ((), ()))).T


def apart(function, scratch_bytes, pins):
    program = trace(function, X, Y, STATE)
    found = unfused_updates(program.graph, spread(program, pins), MESH, scratch_bytes)
    return [op.primitive for op in program.graph.ops if op.results[0] in found.values()]


@pytest.mark.parametrize(("scratch_bytes", "want"), [(0, []), (SMALLER - 1, ["transpose"]), (SMALLER, [])])
def test_gradients_are_kept_apart_where_the_smaller_operand_does_not_fit_on_the_chip(scratch_bytes, want):
    assert apart(momentum, scratch_bytes, {0: WHOLE, 1: COLUMNS, 2: COLUMNS}) == want


def test_reduced_gradients_are_apart_already():
    rows = (("data", "model"), ())
    assert apart(momentum, 1, {0: rows, 1: rows, 2: WHOLE}) == []


def test_products_that_nothing_is_added_to_or_that_lead_to_others_are_left_alone():
    assert apart(lambda x, y, _: x.T @ y, 1, {0: WHOLE, 1: COLUMNS}) == []
    assert apart(lambda x, y, state: x @ (state + x.T @ y), 1, {0: WHOLE, 1: COLUMNS}) == []


@pytest.mark.parametrize(("scratch_bytes", "want"), [(1, 0), (2**30, 1)])
def test_no_compiled_fusion_multiplies_and_updates(scratch_bytes, want):
    x, y, state = jnp.ones((2048, 1024), jnp.bfloat16), jnp.ones((2048, 1024), jnp.bfloat16), jnp.ones((1024, 1024))
    program = trace(momentum, x, y, state)
    assignment = spread(program, {0: WHOLE, 1: COLUMNS, 2: COLUMNS})
    directives = Directives(unfused_updates=unfused_updates(program.graph, assignment, MESH, scratch_bytes))
    lowered = jit_program(program, assignment, MESH, need_tpu(), directives).jitted.lower(x, y, state)
    bodies = re.findall(r"^%fused_computation.*?^}", lowered.compile().as_text(), re.MULTILINE | re.DOTALL)
    assert sum(" convolution(" in body and " add(" in body for body in bodies) == want
