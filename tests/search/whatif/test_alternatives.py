"""Alternatives are priced as whole steps, and what flips them does flip them when everything is priced again."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.price import price
from spmdctx.cost.step import Step
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import project
from spmdctx.machine.presets import PRESETS
from spmdctx.search.problem.space import Space
from spmdctx.search.propagation import propagate
from spmdctx.search.whatif.alternatives import PricedAlternatives, rounded_s, slices, varied
from spmdctx.search.whatif.rescale import with_batch
from tests.road import trace

MESH = LogicalMesh.of({"data": 4, "model": 2})
H100 = PRESETS["h100"]


def step(w, v, mw, mv, x):
    def loss(w, v):
        return jnp.mean((jnp.tanh(x @ w) @ v) ** 2)

    gw, gv = jax.grad(loss, (0, 1))(w, v)
    mw, mv = 0.9 * mw + gw, 0.9 * mv + gv
    return w - mw, v - mv, mw, mv


def problem(batch=4096):
    roles = [Role.PARAMETER] * 2 + [Role.OPTIMIZER] * 2 + [Role.BATCH]
    w, v = jax.ShapeDtypeStruct((1024, 2048), jnp.float32), jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
    program = trace(
        step, w, v, w, v, jax.ShapeDtypeStruct((batch, 1024), jnp.float32), carried=[(0, 0), (1, 1), (2, 2), (3, 3)], roles=roles
    )
    space = Space(program.graph, MESH, H100, program.from_literals)
    return program, propagate(space, {program.graph.inputs[4]: (("data",), ())}, {}, {})


def alternatives(program, assignment, **changes):
    found = PricedAlternatives(program.graph, program.scopes, program.from_literals, (), assignment, MESH, H100)
    return dataclasses.replace(found, **changes)


def total_s(program, assignment, topology=H100, graph=None):
    bill = price(Step(graph or program.graph, program.scopes, program.from_literals), assignment, MESH, topology)
    return bill.compute_s + bill.exposed_communication_s


@pytest.fixture(scope="module")
def made():
    program, assignment = problem()
    return program, assignment, alternatives(program, assignment)


def test_a_delta_is_the_difference_of_two_whole_steps(made):
    program, assignment, found = made
    rows = found.of_value(program.graph.inputs[0])
    assert rows
    for row in rows:
        assert row.delta_s == pytest.approx(total_s(program, row.assignment) - total_s(program, assignment), abs=1e-15)
        assert row.assignment.values[program.graph.inputs[0]] == row.sharding != assignment.values[program.graph.inputs[0]]


def test_the_fastest_comes_first_and_none_twice(made):
    program, _, found = made
    rows = found.of_value(program.graph.inputs[0])
    assert [row.delta_s for row in rows] == sorted(row.delta_s for row in rows)
    assert len({row.sharding for row in rows}) == len(rows)


def test_other_numbers_of_slices_come_before_permuted_axes():
    mesh = LogicalMesh.of({"data": 2, "model": 2})
    program, _ = problem()
    space = Space(program.graph, mesh, H100, program.from_literals)
    assignment = propagate(space, {program.graph.inputs[4]: (("data",), ())}, {}, {})
    found = PricedAlternatives(program.graph, program.scopes, program.from_literals, (), assignment, mesh, H100)
    batch = program.graph.inputs[4]
    own = slices(assignment.values[batch], mesh)
    counts = [slices(row.sharding, mesh) for row in found.of_value(batch)]
    assert len(set(counts)) == len(counts) > 1
    assert own not in counts


def test_the_first_of_each_split_comes_first():
    rows = [("a", (2, 1)), ("b", (4, 1)), ("c", (4, 1)), ("d", (1, 1))]
    assert [name for name, _ in varied(rows, lambda row: row[1], (2, 1))] == ["b", "d", "a", "c"]


@pytest.mark.parametrize(("delta_s", "rounded"), [(1e-20, 0.0), (-1e-20, 0.0), (5e-7, 0.0), (2e-6, 2e-6), (-2e-6, -2e-6)])
def test_a_difference_of_rounding_is_none(delta_s, rounded):
    assert rounded_s(delta_s, 1.0) == rounded


def test_ties_and_moments_follow_a_parameter(made):
    program, _, found = made
    graph = program.graph
    for row in found.of_value(graph.inputs[0]):
        values = row.assignment.values
        assert values[graph.inputs[0]] == values[graph.outputs[0]]
        assert row.num_moved > 0
    best = found.of_value(graph.inputs[0])[0].assignment.values
    assert best[graph.inputs[2]] == best[graph.inputs[0]]


def test_pinned_values_do_not_follow():
    program, assignment = problem()
    moment = program.graph.inputs[2]
    free = alternatives(program, assignment).of_value(program.graph.inputs[0])
    held = alternatives(program, assignment, pinned=frozenset([moment])).of_value(program.graph.inputs[0])
    assert any(row.assignment.values[moment] != assignment.values[moment] for row in free)
    assert all(row.assignment.values[moment] == assignment.values[moment] for row in held)


def test_a_pinned_value_may_be_asked_about_itself():
    program, assignment = problem()
    batch = program.graph.inputs[4]
    rows = alternatives(program, assignment, pinned=frozenset([batch])).of_value(batch)
    assert all(row.sharding != (("data",), ()) for row in rows)
    assert rows


def test_an_op_is_split_otherwise_with_what_it_reads(made):
    program, assignment, found = made
    dot = next(op for op in program.graph.ops if op.primitive == "dot_general")
    rows = found.of_op(dot.id)
    assert rows
    for row in rows:
        assert row.axes != assignment.ops[dot.id].axes
        assert row.assignment.ops[dot.id].axes == row.axes
        assert row.delta_s == pytest.approx(total_s(program, row.assignment) - total_s(program, assignment), abs=1e-15)
        assert len(project(dot.rule.results[0], row.axes)) == len(row.sharding)


def flips_of(found, values):
    return [(row, flip) for value in values for row in found.of_value(value) for flip in found.flips(row)]


def test_a_bandwidth_flips_the_choice_where_it_says(made):
    program, assignment, found = made
    rows = [(row, flip) for row, flip in flips_of(found, program.graph.inputs) if flip.figure == "link_bytes_per_s"]
    assert rows
    for row, flip in rows:
        deltas = []
        for factor in (0.98, 1.02):
            scale = flip.value / H100.link_bytes_per_s * factor
            machine = dataclasses.replace(
                H100, link_bytes_per_s=H100.link_bytes_per_s * scale, network_bytes_per_s=H100.network_bytes_per_s * scale
            )
            deltas.append(total_s(program, row.assignment, machine) - total_s(program, assignment, machine))
        assert (deltas[0] < 0 < deltas[1]) if flip.below else (deltas[1] < 0 < deltas[0])


def test_a_batch_flips_the_choice_where_it_says():
    program, assignment = problem(batch=16384)
    found = alternatives(program, assignment)
    rows = [(row, flip) for row, flip in flips_of(found, program.graph.inputs) if flip.figure == "batch"]
    assert rows
    for row, flip in rows:
        assert row.delta_s > 0
        graph = with_batch(program.graph, Fraction(flip.value) / 16384)
        delta_s = total_s(program, row.assignment, graph=graph) - total_s(program, assignment, graph=graph)
        assert delta_s == pytest.approx(flip.delta_s)
        assert delta_s < 0


def test_an_alternative_that_saves_memory_wins_where_the_plan_no_longer_fits():
    program, assignment = problem(batch=16384)
    found = alternatives(program, assignment, topology=PRESETS["tpu-v5p"])
    rows = [row for value in program.graph.inputs for row in found.of_value(value) if row.delta_bytes < 0 < row.delta_s]
    assert rows
    for row in rows:
        (flip,) = [flip for flip in found.flips(row) if flip.figure == "memory_bytes"]
        assert flip.below
        own = price(Step(program.graph, program.scopes, program.from_literals), assignment, MESH, PRESETS["tpu-v5p"])
        assert flip.value == own.safe_bytes > row.bill.safe_bytes


def test_what_is_faster_but_does_not_fit_comes_last_and_says_what_it_needs():
    program, assignment = problem()
    free = alternatives(program, assignment)
    slim = free.of_value(program.graph.inputs[0])[0].assignment
    budget = price(Step(program.graph, program.scopes, program.from_literals), slim, MESH, H100).safe_bytes
    tight = alternatives(program, slim, memory_bytes=budget)
    rows = [row for value in program.graph.inputs for row in tight.of_value(value)]
    too_large = [row for row in rows if row.bill.safe_bytes > budget]
    assert too_large
    for value in program.graph.inputs:
        fitting = [tight.fits(row) for row in tight.of_value(value)]
        assert fitting == sorted(fitting, reverse=True)
    (flip,) = tight.flips(too_large[0]._replace(delta_s=-1e-6))
    assert (flip.figure, flip.below, flip.value, flip.now) == ("memory_bytes", False, too_large[0].bill.safe_bytes, budget)


def test_nothing_flips_what_is_faster_already(made):
    _, _, found = made
    row = found.of_value(0)[0]._replace(delta_s=-1.0)
    assert found.flips(row) == ()


def test_what_is_as_fast_wins_by_less_memory_only(made):
    _, _, found = made
    row = found.of_value(0)[0]._replace(delta_s=0.0)
    slim = found.flips(row._replace(delta_bytes=-1))
    assert ("memory_bytes", True) in [(flip.figure, flip.below) for flip in slim]
    for flips in (slim, found.flips(row._replace(delta_bytes=1))):
        assert "link_bytes_per_s" not in [flip.figure for flip in flips]
    assert "memory_bytes" not in [flip.figure for flip in found.flips(row._replace(delta_bytes=1))]


def test_a_search_may_say_what_follows(made):
    program, assignment, _ = made
    asked = []

    def force(values, ops):
        asked.append((values, ops))
        return assignment

    alternatives(program, assignment, force=force).of_value(program.graph.inputs[0])
    assert asked
    assert all(list(values) == [program.graph.inputs[0]] and ops == {} for values, ops in asked)


def test_answers_are_the_same_every_time():
    program, assignment = problem()
    first, second = (alternatives(program, assignment).of_value(0) for _ in range(2))
    assert [(row.sharding, row.delta_s, row.assignment) for row in first] == [(row.sharding, row.delta_s, row.assignment) for row in second]
