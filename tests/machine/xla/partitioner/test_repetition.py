"""Operands that readers repeat in different shardings are repeated whole, and sliced."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from spmdctx.audit.collectives import parse_collectives
from spmdctx.cost.price.directives import Directives, completed
from spmdctx.lowering.compile import jit_program
from spmdctx.machine.xla.partitioner.repetition import is_repeated, repeated_values, whole
from tests.audit.compile_only import need_tpu
from tests.road import MESH, ops, run, spread, trace

D, M = ("data",), ("model",)
X, ROW, COLUMN = jnp.linspace(-1.0, 1.0, 32 * 64).reshape(32, 64), jnp.linspace(1.0, 2.0, 64)[None], jnp.linspace(2.0, 3.0, 32)[:, None]
WHOLE = ((), ())


def scaled(x, row, column):
    """A scaling that is made of a whole column, which another reader repeats as slices."""
    sine = jnp.sin(column)
    return x * (sine * row), jnp.exp(jnp.cos(x) * sine).sum(0)


def pins(program):
    slices = ((), ("data", "model"))
    (cosine,), (scale, first, second) = ops(program, "cos"), ops(program, "mul")
    return {0: WHOLE, 1: WHOLE, 2: WHOLE, scale: WHOLE, first: WHOLE, cosine: slices, second: slices}


def test_a_column_repeated_for_two_readers_gives_what_it_gives_on_one_device():
    run(scaled, X, ROW, COLUMN, pins=pins(trace(scaled, X, ROW, COLUMN))).check()


@pytest.mark.parametrize(("knows", "want"), [(True, []), (False, ["all_gather"])])
def test_the_compiler_gathers_nothing_where_the_column_is_repeated_whole(knows, want):
    program = trace(scaled, X, ROW, COLUMN)
    assignment = spread(program, pins(program))
    directives = completed(Directives(), program.graph, program.scopes, assignment, MESH)
    directives = directives if knows else replace(directives, repeated=frozenset())
    lowered = jit_program(program, assignment, MESH, need_tpu(), directives).jitted.lower(X, ROW, COLUMN)
    assert [one.kind for one in parse_collectives(lowered.compile().as_text(), MESH)] == want


def test_values_are_those_that_two_ops_repeat_in_two_ways():
    def function(x, row):
        return x * row, jnp.cos(x) * row

    program = trace(function, X, ROW)
    first, second = ops(program, "mul")
    row = program.graph.inputs[1]
    for split, want in ((WHOLE, []), ((D, ()), [row])):
        assignment = spread(program, {0: WHOLE, 1: WHOLE, first: WHOLE, second: split})
        assert sorted(repeated_values(program.graph, assignment, frozenset())) == want


@pytest.mark.parametrize(("shape", "want"), [((32, 1), True), ((1, 1), True), ((32, 64), False), ((), False)])
def test_scalars_and_full_shapes_are_not_repeated(shape, want):
    assert is_repeated(shape, (32, 64)) is want


def test_what_is_repeated_is_whole_along_the_repeated_dimensions():
    assert whole((D, M), (32, 1), (32, 64)) == (D, ())
