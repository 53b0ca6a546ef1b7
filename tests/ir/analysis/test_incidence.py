"""Operands and results as arrays."""

from spmdctx.ir.analysis.incidence import incidences
from tests.search.graphs import LITERAL, GraphMaker


def made():
    """Values 0 and 1 come in, 2 = f(0, 1), 3 = f(2, literal)."""
    make = GraphMaker()
    first = make.op("add", None, make.input(4), make.input(4), shape=(4,))
    return make.graph(make.op("add", None, first, LITERAL, shape=(4,)))


def columns(found):
    return [own.tolist() for own in found]


def test_operands_come_before_results_and_literals_not_at_all():
    ops, values, slots, positions, is_result = columns(incidences(made(), [0, 0, 2, 3], ()))
    assert ops == [0, 0, 0, 1, 1]
    assert values == [0, 1, 2, 2, 3]
    assert slots == [0, 0, 2, 2, 3]
    assert positions == [0, 1, 0, 0, 0]
    assert is_result == [False, False, True, False, True]


def test_slots_are_left_out_with_all_of_their_values():
    assert incidences(made(), [0, 0, 2, 3], {0, 3}).values.tolist() == [2, 2]


def test_a_graph_without_ops_has_none():
    make = GraphMaker()
    assert columns(incidences(make.graph(make.input(4)), [0], ())) == [[]] * 5
