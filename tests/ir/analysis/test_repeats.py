"""Slices of scanned arrays exist once per iteration of their loop, and so does every reshard of them."""

from dataclasses import replace

import pytest

from spmdctx.cost.price import price
from spmdctx.cost.step import Step
from spmdctx.ir.analysis.repeats import made_repeats, read_repeats
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.rule import FactorKind, OpRule
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.machine.presets import topology
from tests.search.graphs import GraphMaker

LAYERS, WIDTH = 5, 16
PASS = FactorKind.PASS_THROUGH
ENTER = OpRule((((0,), (1,)),), (((1,),),), (LAYERS, WIDTH), (PASS, PASS), frozenset({0}))
EXIT = OpRule((((1,),),), (((0,), (1,)),), (LAYERS, WIDTH), (PASS, PASS), frozenset({0}))
SAME = OpRule((((0,),),), (((0,),),), (WIDTH,), (PASS,))
MESH = LogicalMesh.of((2,))


def loop():
    """One scanned array, one carry, one stacked result; the loop runs twice a step."""
    make = GraphMaker()
    stack, start = make.input(LAYERS, WIDTH), make.input(WIDTH)
    each = make.op("scan.enter", ENTER, stack, shape=(WIDTH,), repeats=2)
    carry = make.op("scan.enter", SAME, start, shape=(WIDTH,), repeats=2)
    make.op("neg", SAME, carry, shape=(WIDTH,), repeats=2 * LAYERS)
    out = make.op("scan.exit", EXIT, each, shape=(LAYERS, WIDTH), repeats=2)
    return make.graph(out)


def test_slices_are_read_and_made_once_per_turn_and_carries_once():
    graph = loop()
    assert [read_repeats(graph, op) for op in graph.ops] == [2, 2, 2 * LAYERS, 2 * LAYERS]
    assert [made_repeats(graph, op) for op in graph.ops] == [2 * LAYERS, 2, 2 * LAYERS, 2]


@pytest.mark.parametrize(("place", "repeats"), [("enter", 2 * LAYERS), ("exit", 2 * LAYERS), ("carry", 2)])
def test_the_bill_counts_a_reshard_as_often_as_its_value_is_there(place, repeats):
    graph = loop()
    ops = [OpSharding(((),) * len(op.rule.sizes)) for op in graph.ops]
    values = [((),) * len(value.shape) for value in graph.values]
    split = {"enter": 0, "exit": 3, "carry": 1}[place]
    op = graph.ops[split]
    ops[split] = OpSharding(((), ("data",)) if len(op.rule.sizes) == 2 else (("data",),))
    for value in op.operands if place != "exit" else op.results:
        values[value] = (*((),) * (len(graph.values[value].shape) - 1), ("data",))
    machine = replace(topology("h100"), merges_partial_sums=False)
    if place == "exit":
        values[op.results[0]] = ((), ())
        values[op.operands[0]] = (("data",),)
        ops[split] = OpSharding(((), ()))
    bill = price(Step(graph, (0,) * len(graph.ops), frozenset()), Assignment(tuple(ops), tuple(values), "made"), MESH, machine)
    gathers = [row.repeats for row in bill.collectives if row.kind == "all_gather"]
    assert repeats in gathers
