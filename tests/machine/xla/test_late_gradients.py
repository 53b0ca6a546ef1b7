"""Gradients of recomputed regions: which ops wait for the end of their region, and what lives until then."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.memory.lives import step_memory
from spmdctx.ir.graph import Role
from spmdctx.machine.presets import CPU, GPU, TPU
from spmdctx.machine.xla.memory.late_gradients import (
    barriers_wait,
    made_in_turn,
    stacked_last,
    updates_wait,
    waits_in_regions,
    waits_outside,
)
from spmdctx.trace.build.build import Argument, build

WIDTH, ROWS = 8, 64


def layer(own, x):
    return x + jnp.tanh(jnp.tanh(x @ own["up"]) @ own["mix"]) @ own["down"]


def loss(params, x, *, remat=True):
    for own in params:
        x = (jax.checkpoint(layer) if remat else layer)(own, x)
    return (x * x).mean()


def scanned(params, x):
    return (
        jax.lax.scan(lambda x, own: (jax.checkpoint(layer)(own, x), None), x, jax.tree.map(lambda *own: jnp.stack(own), *params))[0] ** 2
    ).mean()


def program_of(fn, count=3):
    shapes = {"up": (WIDTH, 2 * WIDTH), "mix": (2 * WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    args = [{name: jnp.ones(shape) for name, shape in shapes.items()}] * count, jnp.ones((ROWS, WIDTH))
    jaxpr = jax.make_jaxpr(jax.grad(fn))(*args)
    return build(jaxpr, [Argument("", Role.PARAMETER)] * len(jaxpr.jaxpr.invars))


def updated(*, remat=False):
    """Adds the gradients of layers to sums, as the backward pass of a stage does."""

    def fn(params, x, sums):
        gradients = jax.grad(lambda params, x: loss(params, x, remat=remat))(params, x)
        return jax.tree.map(lambda own, gradient: own + gradient, sums, gradients)

    shapes = {"up": (WIDTH, 2 * WIDTH), "mix": (2 * WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    params = [{name: jnp.ones(shape) for name, shape in shapes.items()}] * 3
    jaxpr = jax.make_jaxpr(fn)(params, jnp.ones((ROWS, WIDTH)), params)
    return build(jaxpr, [Argument("", Role.PARAMETER)] * len(jaxpr.jaxpr.invars))


def products_of(program, waits):
    return sorted(index for index in waits if program.graph.ops[index].primitive == "dot_general")


def test_products_that_make_gradients_wait_for_the_end_of_their_region():
    program = program_of(loss)
    waits = waits_in_regions(program.graph, program.scopes)
    assert len(products_of(program, waits)) == 3 * 2
    for index, last in waits.items():
        assert program.scopes[index] == program.scopes[last] > 0
        assert last == max(other for other, scope in enumerate(program.scopes) if scope == program.scopes[index])


def test_what_only_they_read_waits_too_and_its_operands_live_until_then():
    program = program_of(loss)
    graph, waits = program.graph, waits_in_regions(program.graph, program.scopes)
    for index in waits:
        if graph.ops[index].primitive != "dot_general":
            readers = [reader.id for value in graph.ops[index].results for reader in graph.readers[value]]
            assert readers
            assert set(readers) <= set(waits)
    lives = step_memory(graph, program.scopes, delays_gradients=True, fuses_into_products=False).lives
    late = {life.value: life for life in lives if life.value not in graph.inputs}
    for index in products_of(program, waits):
        for value in graph.ops[index].operands:
            if value in late:
                # The last op may write over it.
                assert late[value].end >= waits[index] - 1


def test_nothing_waits_without_regions():
    program = program_of(lambda params, x: loss(params, x, remat=False))
    assert waits_in_regions(program.graph, program.scopes) == {}


def test_without_regions_every_gradient_is_made_when_it_is_read():
    program = updated()
    graph, waits = program.graph, waits_outside(program.graph, program.scopes)
    assert len(products_of(program, waits)) == len(waits) == 3 * 3
    assert all(graph.ops[reader].primitive == "add" for reader in waits.values())
    memory = step_memory(graph, program.scopes, delays_gradients=True, fuses_into_products=False)
    assert [memory.runs[index] for index in waits] == list(waits.values())


@pytest.mark.parametrize("fn", [loss, scanned])
def test_steps_with_regions_or_loops_have_no_others_that_wait(fn):
    program = program_of(fn)
    assert waits_outside(program.graph, program.scopes) == {}


def test_all_gradients_of_a_loop_wait_for_the_end_of_its_iteration():
    program = program_of(scanned)
    graph, waits = program.graph, waits_in_regions(program.graph, program.scopes)
    assert len(products_of(program, waits)) == 3
    memory = step_memory(graph, program.scopes, delays_gradients=True, fuses_into_products=False)
    for index in products_of(program, waits):
        assert memory.runs[index] == waits[index] <= memory.iteration_ends[index]
        # What they read is there until then.
        kept = {life.value: life.end for life in memory.lives if life.value in graph.ops[index].operands}
        assert kept
        assert all(end >= waits[index] - 1 for end in kept.values())


def test_no_gradient_of_several_regions_is_made_last():
    program = updated(remat=True)
    graph, in_turn = program.graph, made_in_turn(program.graph, program.scopes)
    assert len(in_turn) == 3 * 3
    every, left = (step_memory(graph, program.scopes, delays_gradients=delays).gradients for delays in (False, True))
    assert {one.op for one in every} == in_turn
    assert left == ()


def test_gradients_outside_of_regions_and_of_the_only_region_may_be_made_last():
    program, single = updated(), program_of(loss, count=1)
    assert made_in_turn(program.graph, program.scopes) == made_in_turn(single.graph, single.scopes) == frozenset()


def test_gradients_wait_for_the_next_region_that_communicates_or_the_end():
    program = updated(remat=True)
    graph, scopes = program.graph, program.scopes
    products = sorted(made_in_turn(graph, scopes))
    regions = [products[:3], products[3:6], products[6:]]
    begins = [min(index for index, scope in enumerate(scopes) if scope == scopes[own[0]]) for own in regions]
    end = len(graph.ops) - 1

    def waits(*moving):
        found = updates_wait(graph, scopes, moving)
        return [{found[graph.ops[index].results[0]] for index in own} for own in regions]

    assert waits(end) == [{end}] * 3
    assert waits(regions[1][0]) == [{begins[1]}, {end}, {end}]
    assert waits(regions[1][0], regions[2][0]) == [{begins[1]}, {begins[2]}, {end}]


def test_no_update_waits_without_several_regions():
    program, single = updated(), program_of(loss, count=1)
    assert updates_wait(program.graph, program.scopes, [0]) == updates_wait(single.graph, single.scopes, [0]) == {}


def test_without_collectives_gradients_wait_for_barriers():
    program = updated(remat=True)
    graph, scopes = program.graph, program.scopes
    products = sorted(made_in_turn(graph, scopes))
    first, second, _ = (max(index for index, scope in enumerate(scopes) if scope == scopes[products[place]]) for place in (0, 3, 6))
    found = barriers_wait(graph, scopes)
    # No barrier stands behind the last region: its gradients, and the last one of the region before, wait for nothing.
    expected = [first, first, second, second, second, None, None, None, None]
    assert [found.get(graph.ops[index].results[0]) for index in products] == expected


@pytest.mark.parametrize("fn", [scanned, lambda params, x: loss(params, x, remat=False)])
def test_no_gradient_waits_for_a_barrier_in_loops_or_without_regions(fn):
    program = program_of(fn)
    assert barriers_wait(program.graph, program.scopes) == {}


def test_gradients_that_a_loop_stacks_up_are_there_to_the_end_of_their_iteration():
    program = program_of(scanned)
    graph, late = program.graph, stacked_last(program.graph)
    assert len(late) == 3
    lives = step_memory(graph, program.scopes, is_split=False, delays_gradients=True, fuses_into_products=False).lives
    ends = {life.value: life.end for life in lives}
    for value, end in late.items():
        assert graph.ops[end].primitive == "scan.exit"
        assert ends[value] == end


@pytest.mark.parametrize("fn", [loss, scanned])
def test_on_one_device_no_gradient_waits(fn):
    """Its compiler runs first what frees memory."""
    program = program_of(fn)
    one, other = (step_memory(program.graph, program.scopes, is_split=False, delays_gradients=delays) for delays in (True, False))
    assert one.runs == other.runs


def test_gpu_alone_delays_gradients():
    assert [compiler.delays_gradients for compiler in (GPU, TPU, CPU)] == [True, False, False]
