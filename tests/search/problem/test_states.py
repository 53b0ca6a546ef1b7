"""The states of an op: its legal splits, and what becomes of partial results."""

from dataclasses import replace

import numpy as np
import pytest

from spmdctx.cost.roofline import compute_time_s
from spmdctx.ir.domain import domain
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.presets import topology
from spmdctx.machine.topology import without_latency
from spmdctx.search.problem.states import Joins, ResultUse, following, shapes_of, split_of_axes, split_of_rule, states_of
from tests.oracles.exhaustive import all_splits
from tests.search.random_graphs import StepMaker, random_step

MESH = LogicalMesh.of((2, 2))
MACHINE = topology("h100")


def _dot():
    make = StepMaker()
    make.dot(make.input(8, 16), make.input(16, 4))
    step = make.finish()
    return step.graph, step.graph.ops[0]


def _add():
    make = StepMaker()
    make.same("add", make.input(8, 4), make.input(8, 4))
    step = make.finish()
    return step.graph, step.graph.ops[0]


def _states(graph, op, joins, is_terminal=False, machine=MACHINE):
    split = split_of_rule(op, shapes_of(graph, op), op.rule.splittable, MESH)
    return split, states_of(graph, op, split, joins, MESH, machine, ResultUse(is_terminal))


@pytest.mark.parametrize("seed", range(12))
def test_the_splits_of_a_rule_are_all_legal_ones(seed):
    step = random_step(seed)
    for op in step.graph.ops:
        split = split_of_rule(op, shapes_of(step.graph, op), op.rule.splittable, MESH)
        codes = domain(MESH, (4,)).codes
        assert {codes.sharding(row) for row in split.rows.tolist()} == set(all_splits(op.rule, MESH))


def test_a_fixed_split_is_the_only_one():
    graph, op = _dot()
    split = split_of_axes(op, shapes_of(graph, op), (("data",), (), ("model",)), MESH)
    assert len(split.rows) == 1


def _of(graph, op, states, split, axes):
    """The states of one split: where the result is left, over which axes unreduced, and seconds beside compute."""
    codes, shape = domain(MESH, (4,)).codes, graph.values[op.results[0]].shape
    compute_s = compute_time_s(graph, op, axes, MESH, MACHINE)
    return {
        (domain(MESH, shape).shardings[states.stored[0][state]], int(states.unreduced_out[state])): states.seconds[state] - compute_s
        for state in range(len(states.seconds))
        if codes.sharding(split.rows[states.split[state]].tolist()) == axes
    }


def _contracted(op, axes):
    """The split of the contracted factor only."""
    factor = next(index for index, kind in enumerate(op.rule.kinds) if kind.value == "reduction")
    return tuple(axes if index == factor else () for index in range(len(op.rule.sizes)))


def test_a_partial_result_is_reduced_scattered_or_handed_on():
    graph, op = _dot()
    split, states = _states(graph, op, Joins(False, True))
    found = _of(graph, op, states, split, _contracted(op, ("data",)))
    payload = 8 * 4 * 4
    scattered_s = collective_time_s("reduce_scatter", payload, ("data",), MESH, MACHINE)
    assert found == {
        (((), ()), 0): pytest.approx(collective_time_s("all_reduce", payload, ("data",), MESH, MACHINE)),
        (((), ()), 1): pytest.approx(0.0, abs=1e-12),
        ((("data",), ()), 0): pytest.approx(scattered_s),
        (((), ("data",)), 0): pytest.approx(scattered_s),
    }


@pytest.mark.parametrize(("combines", "raw_machine"), [(False, MACHINE), (True, without_latency(MACHINE))])
def test_neither_what_hides_of_a_gradient_s_reduction_nor_its_latency_is_counted(combines, raw_machine):
    graph, op = _dot()
    axes, none = _contracted(op, ("data",)), Joins(False, False)
    machine = replace(MACHINE, reduction_overlap=0.5, combines_reductions=combines)
    raw = _of(graph, op, *reversed(_states(graph, op, none, False, raw_machine)), axes)
    half = _of(graph, op, *reversed(_states(graph, op, none, True, machine)), axes)
    assert half == {state: pytest.approx(seconds / 2) for state, seconds in raw.items()}
    assert _of(graph, op, *reversed(_states(graph, op, none, False, machine)), axes) == _of(
        graph, op, *reversed(_states(graph, op, none)), axes
    )


def test_a_sum_takes_its_terms_unreduced_over_axes_that_it_does_not_use():
    graph, op = _add()
    split, states = _states(graph, op, Joins(True, False))
    bits = domain(MESH, (4,)).codes.bits[split.rows[states.split]]
    assert not (bits.max(axis=1) & states.unreduced_in).any()
    assert set(states.unreduced_in.tolist()) == {0, 1, 2, 3}
    assert not _states(graph, op, Joins(False, False))[1].unreduced_in.any()


def test_every_state_follows_each_operand_once():
    graph, op = _add()
    states = _states(graph, op, Joins(False, False))[1]
    doubled = following(states, [0, 1])
    assert (states.follows == -1).all()
    assert doubled.follows.tolist() == [0] * len(states.follows) + [1] * len(states.follows)
    np.testing.assert_array_equal(doubled.seconds, np.tile(states.seconds, 2))
    assert following(states, []) is states
