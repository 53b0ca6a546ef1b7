"""Plans whose layers follow two others: as few as need be take the plan of less memory."""

from dataclasses import replace

import pytest

from spmdctx.cost.step import Step, bill_of
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.machine.presets import topology
from spmdctx.search.dynamic import effort
from spmdctx.search.dynamic.plans.mixed import Choice, fewest, mixed, promising_pair
from spmdctx.search.dynamic.results import DynamicOptions, Found
from spmdctx.search.dynamic.searcher import plan_dynamic
from spmdctx.search.problem.layers import NOWHERE, Layers
from spmdctx.search.problem.space import Space
from spmdctx.search.setup.request import Request
from tests.search.problem.test_fold import MESH, _layers, _shared_rules

MACHINE = topology("h100")


@pytest.mark.parametrize("count", [3, 7, 20, 80])
@pytest.mark.parametrize("guess", [0, 1, 2, 10, 79, 100])
def test_the_fewest_layers_are_found_in_few_tries(count, guess):
    for least in range(1, count + 2):
        tried = []
        found = fewest(lambda own, least=least, tried=tried: tried.append(own) or own >= least, guess, count)
        assert found == (least if least < count else None)
        assert all(0 < own < count for own in tried)
        assert len(tried) == len(set(tried)) <= 13


def test_pairs_lie_on_both_sides_of_the_room_and_the_most_promising_comes_first():
    fast, over, fits, slow = Choice(1.0, 200.0, (0,)), Choice(1.5, 120.0, (1,)), Choice(2.0, 90.0, (2,)), Choice(3.0, 40.0, (3,))
    tried = []
    while (pair := promising_pair([slow, fits, over, fast], 100.0, 2.0, tried)) is not None:
        tried.append(pair)
    assert [(own.cheap, own.small) for own in tried] == [(over, fits), (over, slow), (fast, fits)]
    assert [own.expected_s for own in tried] == pytest.approx([1.5 + 0.5 * 2 / 3, 1.5 + 1.5 * 0.25, 1.0 + 1 / 1.1])
    assert promising_pair([slow, fits], 100.0, 2.0, ()) is None
    assert promising_pair([slow, fits, over, fast], 100.0, 1.8, ()) is None


def test_the_first_layers_and_what_is_in_none_follow_the_smaller_plan():
    graph = _shared_rules(_layers(3))
    space = Space(graph, MESH, MACHINE, frozenset())
    ways = [
        Assignment(tuple([OpSharding((names,) * len(op.rule.sizes)) for op in graph.ops]), tuple([(names,) for _ in graph.values]), "test")
        for names in (("cheap",), ("small",))
    ]
    of_ops = [NOWHERE, *(op % 3 for op in range(1, len(graph.ops)))]
    of_slots = [slot % 3 for slot in range(len(graph.values))]
    found = mixed(space, Layers(3, of_ops, of_slots), *ways, 2)
    assert [own.axes[0] for own in found.ops] == [("cheap",) if layer == 2 else ("small",) for layer in of_ops]
    assert [own[0] for own in found.values] == [("cheap",) if of_slots[slot] == 2 else ("small",) for slot in space.slot_of]


@pytest.fixture(scope="module")
def deep():
    graph = _shared_rules(_layers(140, width=256, rows=8192))
    return Step(graph, (0,) * len(graph.ops), frozenset(), frozenset())


REQUEST = Request("auto_parallel", 4, None, None, (), frozenset(), (), (), frozenset())


def _plan(step, budget, *, mixes):
    options = DynamicOptions(memory_bytes=budget)
    schedule = effort.LARGE_PLAN
    attempts, later = (
        tuple([own._replace(effort=own.effort._replace(mixes=mixes)) for own in every]) for every in (schedule.attempts, schedule.later)
    )
    return plan_dynamic(step, REQUEST, MACHINE, replace(options, schedule=schedule._replace(attempts=attempts, later=later)))


def test_a_plan_with_mixed_layers_fits_is_cheaper_and_costs_what_its_bill_says(deep):
    free = plan_dynamic(deep, REQUEST, MACHINE, DynamicOptions())
    peak = bill_of(deep, free.assignment, free.setup.mesh, MACHINE).safe_bytes
    cheaper = 0
    for share in (0.9, 0.7, 0.5):
        budget = int(share * peak)
        plain, found = (_plan(deep, budget, mixes=mixes) for mixes in (False, True))
        assert isinstance(found, Found)
        bill = bill_of(deep, found.assignment, found.setup.mesh, MACHINE)
        assert bill.safe_bytes <= budget
        assert found.lower_bound_s <= found.cost_s <= plain.cost_s * (1 + 1e-9)
        is_mixed = any("so that the plan fits" in note for note in found.setup.notes)
        assert found.cost_s == pytest.approx(bill.total_s, rel=1e-6)
        cheaper += is_mixed and found.cost_s < plain.cost_s
        assert not any("so that the plan fits" in note for note in plain.setup.notes)
    assert cheaper


def test_no_layer_is_mixed_where_a_plan_is_proven(deep):
    free = plan_dynamic(deep, REQUEST, MACHINE, DynamicOptions(memory_bytes=2**50))
    assert free.cost_s <= free.lower_bound_s * (1 + 1e-9)
    assert not any("so that the plan fits" in note for note in free.setup.notes)
