"""The truth for searches: itself held against trying every assignment literally."""

from itertools import product
from math import inf

import numpy as np
import pytest

from spmdctx.cost.evaluate import all_shardings, evaluate
from spmdctx.cost.memory.lives import compiled_memory
from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import local_bytes
from spmdctx.ir.sharding import Assignment, OpSharding
from tests.oracles import exhaustive_tables
from tests.oracles.exhaustive import Conditions, all_splits, exhaustive
from tests.oracles.exhaustive_tables import Elimination
from tests.search.random_graphs import StepMaker, random_machine, random_mesh, random_step

TWO = LogicalMesh.of((2,))
SQUARE = LogicalMesh.of((2, 2))


def _two_ops():
    make = StepMaker()
    x, w = make.input(8, 16, role=Role.BATCH), make.input(16, 4, role=Role.PARAMETER)
    return make.finish(make.same("tanh", make.dot(x, w)))


def _shared_operand():
    """Two products that read one value, and a sum of what they make."""
    make = StepMaker()
    x, w = make.input(8, 8, role=Role.BATCH), make.input(8, 8, role=Role.PARAMETER)
    return make.finish(make.same("add", make.dot(x, w), make.dot(x, w)))


def _carried_state():
    make = StepMaker()
    w, g = make.input(8, 64, role=Role.PARAMETER), make.input(64, 8)
    after = make.same("add", w, make.transpose(g))
    make.ties.append((w, after))
    return make.finish(after)


def _least_literally(step, machine, pins):
    """The least seconds over the product of all splits and all stored shardings."""
    graph = step.graph
    splits = [all_splits(op.rule, TWO) for op in graph.ops]
    stored = [[pins[value.id]] if value.id in pins else all_shardings(value.shape, TWO) for value in graph.values]
    least = inf
    for axes in product(*splits):
        ops = tuple(OpSharding(own) for own in axes)
        for values in product(*stored):
            if all(values[a] == values[b] for a, b in graph.ties):
                pinned = frozenset(pins)
                seconds = evaluate(graph, step.scopes, step.from_literals, Assignment(ops, values, ""), TWO, machine, pinned).total_s
                least = min(least, seconds)
    return least


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [_two_ops, _shared_operand, _carried_state])
def test_the_optimum_is_the_least_of_all_assignments_tried_one_by_one(make, seed):
    step, machine = make(), random_machine(seed)
    last = len(step.graph.inputs) - 1
    pins = {
        value: all_shardings(step.graph.values[value].shape, TWO)[seed % 3] for value in (last, *([0] if make is _shared_operand else []))
    }
    found = exhaustive(step.graph, step.scopes, step.from_literals, TWO, machine, Conditions(pins=pins))
    assert found.cost_s == pytest.approx(_least_literally(step, machine, pins), rel=1e-12)
    assert all(found.assignment.values[value] == own for value, own in pins.items())


@pytest.mark.parametrize("seed", range(30))
def test_the_seconds_of_the_optimum_are_those_of_its_assignment(seed):
    step, mesh, machine = random_step(seed), random_mesh(seed), random_machine(seed)
    found = exhaustive(step.graph, step.scopes, step.from_literals, mesh, machine)
    assert evaluate(step.graph, step.scopes, step.from_literals, found.assignment, mesh, machine).total_s == pytest.approx(
        found.cost_s, rel=1e-12
    )


def test_all_shardings_hold_every_axis_order():
    assert len(all_shardings((8, 8), SQUARE)) == 11
    assert all_shardings((2, 3), SQUARE) == (((), ()), (("data",), ()), (("model",), ()))


def test_a_minor_factor_is_split_only_where_the_major_one_is_split_completely():
    make = StepMaker()
    make.reshape(make.input(2, 8), 16)
    splits = all_splits(make.ops[0].rule, SQUARE)
    assert (("data",), ("model",)) in splits
    assert ((), ("model",)) not in splits


def test_a_budget_is_kept_by_what_is_stored():
    step, machine = _two_ops(), random_machine(2)
    free = exhaustive(step.graph, step.scopes, step.from_literals, TWO, machine)
    lives = compiled_memory(step.graph, step.scopes, frozenset(), machine.compiler).lives

    def peak(assignment):
        sizes = [local_bytes(value, own, TWO) for value, own in zip(step.graph.values, assignment.values, strict=True)]
        return max(sum(sizes[value] for value, start, end in lives if start <= time <= end) for time in range(2))

    budget = sum(local_bytes(value, ((),) * 2, TWO) for value in step.graph.values[:2]) // 2 + 64
    kept = exhaustive(step.graph, step.scopes, step.from_literals, TWO, machine, Conditions(memory_bytes=budget))
    assert peak(kept.assignment) <= budget < peak(free.assignment)
    assert kept.cost_s >= free.cost_s * (1 - 1e-12)


def test_nothing_is_found_where_nothing_fits():
    step = _two_ops()
    assert exhaustive(step.graph, step.scopes, step.from_literals, TWO, random_machine(0), Conditions(memory_bytes=16)) is None


def test_a_graph_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(exhaustive_tables, "LARGEST", 100)
    step = random_step(1)
    with pytest.raises(UnsupportedError, match="too large to try everything"):
        exhaustive(step.graph, step.scopes, step.from_literals, SQUARE, random_machine(1))


def _random_tables(seed):
    rng = np.random.default_rng(seed)
    tables = Elimination()
    sizes = rng.integers(1, 4, size=5).tolist()
    for variable, size in enumerate(sizes):
        tables.add_variable(variable, size)
    known = []
    for _ in range(6):
        variables = tuple(rng.choice(5, size=rng.integers(1, 4)).tolist())
        seconds = rng.integers(0, 9, size=[sizes[one] for one in variables]).astype(float)
        tables.add_table(variables, seconds)
        known.append((variables, seconds))
    sums = sorted(sum(table[tuple(values[one] for one in own)] for own, table in known) for values in product(*map(range, sizes)))
    return tables, sums


@pytest.mark.parametrize("seed", range(8))
def test_tables_are_summed_over_all_values_of_their_variables(seed):
    tables, sums = _random_tables(seed)
    assert tables.least()[0] == sums[0]
    assert [cost for cost, _ in tables.in_order([0, 1], lambda values: True)] == sums
