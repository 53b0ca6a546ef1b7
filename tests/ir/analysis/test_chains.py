"""Walks meet each value once, go on only where they may, and end where there are too many values."""

from spmdctx.ir.analysis.chains import LONGEST, Walk, ends_below
from spmdctx.ir.analysis.kinds import of_primitives
from spmdctx.ir.rule import FactorKind, OpRule
from tests.search.graphs import GraphMaker

SAME = OpRule((((0,),),), (((0,),),), (8,), (FactorKind.PASS_THROUGH,))
ADDED = OpRule((((0,),), ((0,),)), (((0,),),), (8,), (FactorKind.PASS_THROUGH,))


def passing(graph):
    return of_primitives(graph, {"neg", "add"}).tolist()


def test_the_ops_that_end_a_chain_are_found_with_the_values_that_they_read():
    make = GraphMaker()
    start = make.input(8)
    left, right = (make.op("neg", SAME, start, shape=(8,)) for _ in range(2))
    total = make.op("add", ADDED, left, right, shape=(8,))
    ends = make.op("sort", SAME, left, shape=(8,)), make.op("sort", SAME, total, shape=(8,))
    make.op("neg", SAME, ends[0], shape=(8,))
    graph, walk = make.graph(*ends), Walk([start])
    found = {(value, op.results[0]) for value, op in ends_below(graph, walk, passing(graph))}
    assert found == {(left, ends[0]), (total, ends[1])}
    assert list(walk.met) == [start, left, right, total]
    assert not walk.is_cut


def test_nothing_behind_the_first_end_is_looked_at_before_it_is_asked_for():
    make = GraphMaker()
    start = make.input(8)
    make.op("sort", SAME, start, shape=(8,))
    behind = make.op("neg", SAME, make.op("neg", SAME, start, shape=(8,)), shape=(8,))
    graph, walk = make.graph(behind), Walk([start])
    assert next(ends_below(graph, walk, passing(graph)))[0] == start
    assert behind not in walk.met


def test_a_walk_that_is_as_long_as_it_may_be_is_whole_and_a_longer_one_is_cut():
    for length in (LONGEST, LONGEST + 1):
        walk = Walk([0])
        for value in walk:
            walk.reach({value + 1} if value + 1 < length else ())
        assert walk.is_cut == (length > LONGEST)
        assert len(walk.met) == LONGEST


def test_a_circle_is_walked_once():
    walk = Walk([0, 3])
    visited = []
    for value in walk:
        visited.append(value)
        walk.reach([(value + 1) % 6])
    assert sorted(visited) == list(range(6))
    assert not walk.is_cut
