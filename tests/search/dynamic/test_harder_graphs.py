"""Harder random graphs: dynamic_programming, the truth, plain evaluation and the bill have one number."""

from dataclasses import replace

import pytest

from spmdctx.cost.evaluate import evaluate
from spmdctx.cost.price import price
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.directives import priced_directives
from spmdctx.cost.step import Step
from spmdctx.errors import UnsupportedError
from spmdctx.ir.analysis.loop_sums import holds_of, loop_sums
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import Searcher
from tests.oracles.exhaustive import Conditions, exhaustive
from tests.search.harder_graphs import harder_case

TOGETHER = 10
"""Graphs of one test."""


def _check(seed):
    """Whether the graph is small enough to be tried out; then all of its figures agree, and the bill is none above them."""
    made, setup, machine = harder_case(seed)
    graph, mesh, pins = made.graph, setup.mesh, {**setup.pins, **setup.partial_pins}
    try:
        truth = exhaustive(graph, made.scopes, made.from_literals, mesh, machine, Conditions(pins=pins)).cost_s
    except UnsupportedError:
        return False
    step = Step(graph, made.scopes, made.from_literals)
    found = Searcher(step, machine, DynamicOptions()).search(setup)
    assert found.cost_s == pytest.approx(truth, rel=1e-9), seed
    assert truth * (1 - 1e-9) <= found.lower_bound_s <= truth * (1 + 1e-9), seed
    seconds = evaluate(graph, made.scopes, made.from_literals, found.assignment, mesh, machine, frozenset(pins)).total_s
    assert seconds == pytest.approx(truth, rel=1e-9), seed
    holds = holds_of(graph, loop_sums(graph), found.assignment, mesh)
    directives = replace(priced_directives(Assigned(step, found.assignment, mesh, machine)), loop_sums=holds)
    bill = price(step, found.assignment, mesh, machine, directives)
    assert bill.compute_s + bill.exposed_communication_s <= truth * (1 + 1e-9), seed
    return True


@pytest.mark.parametrize("first", range(60000, 60040, TOGETHER))
def test_all_agree_on_what_hides_most(first, monkeypatch):
    monkeypatch.setattr("tests.oracles.exhaustive_tables.LARGEST", 1 << 18)
    assert sum(map(_check, range(first, first + TOGETHER))) >= TOGETHER // 2


# The gathers of an argmax that hide; results that are scattered along one dimension and sliced along another; sums over the same axes
# in another order.
@pytest.mark.parametrize("seed", [60351, 60640, 60015, 60711, 63144])
def test_all_agree_where_once_they_did_not(seed):
    assert _check(seed)
