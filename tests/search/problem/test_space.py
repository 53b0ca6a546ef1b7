"""Kinds of ops: ops share a price only if they are alike in everything that a price depends on."""

import warnings
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest

from benchmarks.fuzz_moves import MOVES
from benchmarks.fuzz_programs import make_program
from spmdctx.errors import ContextWarning
from spmdctx.ir.graph import LITERAL
from spmdctx.machine.presets import topology
from spmdctx.search.problem.space import Space
from tests.road import MESH, trace
from tests.search.random_graphs import random_step


def _described(space, op):
    values = [*op.operands, *op.results]
    tensors = [None if value == LITERAL else tuple(space.graph.values[value][1:3]) for value in values]
    free = [slot in space.free_slots for slot in space.op_slots[op.id]]
    passing = [value != LITERAL and bool(space.passing[value]) for value in values]
    return str((op.primitive, op.rule, tensors, free, passing, op.flops, op.fused, op.work))


def _check(graph, from_literals):
    space = Space(graph, MESH, topology("h100"), from_literals)
    found = defaultdict(set)
    for op in graph.ops:
        found[space.kind_of[op.id]].add(_described(space, op))
    assert all(len(own) == 1 for own in found.values())
    assert space.kinds == [space._kind(graph.ops[space.kind_of.index(number)]) for number in range(len(space.kinds))]


@pytest.mark.parametrize("seed", range(60))
def test_a_kind_of_a_random_graph_has_ops_of_one_description(seed):
    step = random_step(seed)
    _check(step.graph, step.from_literals)


def _router(x, router):
    """Experts beside those that no token may choose, as a mask from literals."""
    masked = jnp.where(jnp.arange(8) < 6, x @ router, -1e9)
    best, which = jax.lax.top_k(jax.nn.softmax(masked), 2)
    return best, jnp.argsort(which.reshape(-1)), jnp.bincount(which.reshape(-1), length=8)


def _positions(x, y):
    """Values from literals at every place of ops that also take others."""
    rows = jnp.arange(16.0)[:, None] * jnp.ones((16, 16))
    return rows * x, x * rows, jnp.where(rows > 3, x, y), jnp.where(x > 3, rows, y), jnp.where(y > 3, x, rows), rows + rows


def _types(x, y):
    """One shape in many types: conversions to a type come from different ones."""
    turns = [x.astype(kind) for kind in (jnp.bfloat16, jnp.int8, jnp.int32, bool)]
    return [turn.astype(kind) for turn in turns for kind in (jnp.float32, jnp.float16)], y.astype(jnp.float16)


def _layers(x, y):
    for place in range(40):
        drawn = jax.random.bernoulli(jax.random.key(place), 0.5, x.shape)
        x = jnp.where(drawn if place % 3 else ~drawn, jnp.tanh(x @ y), 0.0 if place % 2 else x)
    return x


@pytest.mark.parametrize("number", range(12))
def test_a_kind_of_a_fuzzed_program_has_ops_of_one_description(number):
    made = make_program(f"kinds {number}", MOVES)
    step, arguments = made.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextWarning)
        program = trace(step, *arguments())
    _check(program.graph, program.from_literals)


@pytest.mark.parametrize("function", [_router, _positions, _types, _layers])
def test_a_kind_of_a_traced_program_has_ops_of_one_description(function):
    program = trace(function, jnp.ones((16, 16)), jnp.ones((16, 8 if function is _router else 16)))
    _check(program.graph, program.from_literals)
