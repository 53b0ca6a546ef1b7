"""The layers of a folded program: ops, parameters and values of one layer share its number."""

from spmdctx.machine.presets import topology
from spmdctx.search.problem.layers import NOWHERE, Layers, layers_of
from spmdctx.search.problem.space import NO_SLOT, Space
from tests.search.problem.test_fold import MESH, PER_LAYER, _fold, _layers, _shared_rules

COUNT = 130


def _found(graph):
    return layers_of(Space(graph, MESH, topology("h100"), frozenset()), _fold(graph))


def test_ops_and_parameters_of_a_layer_have_its_number_and_numbers_rise():
    graph = _shared_rules(_layers(COUNT))
    found = _found(graph)
    assert COUNT - 10 <= found.num_layers <= COUNT
    assert list(found.of_ops) == sorted(found.of_ops)
    assert set(found.of_ops) == set(range(found.num_layers))
    space = Space(graph, MESH, topology("h100"), frozenset())
    for layer in range(30, 100):
        ops = range(layer * PER_LAYER, (layer + 1) * PER_LAYER)
        (number,) = {found.of_ops[op] for op in ops}
        assert {found.of_ops[op + PER_LAYER] for op in ops} == {number + 1}
        weights = [slot for op in ops for slot in space.op_slots[op] if slot != NO_SLOT and slot not in space.graph.producers]
        assert {found.of_slots[slot] for slot in weights} == {number}


def test_a_program_that_is_not_folded_has_no_layers():
    assert _found(_shared_rules(_layers(10))) is None


def test_what_all_layers_read_is_in_none():
    graph = _shared_rules(_layers(COUNT))
    op = graph.ops[0]
    shared = graph.inputs[0]
    ops = tuple(own._replace(operands=(shared, *own.operands[1:])) if own.primitive == op.primitive else own for own in graph.ops)
    changed = graph.__class__(graph.values, ops, graph.inputs, graph.outputs, graph.ties, graph.origins, graph.fingerprint)
    assert _found(changed).of_slots[shared] == NOWHERE


def test_slots_that_depend_on_another_go_to_its_layer():
    layers = Layers(3, (0, 1, 2), (0, 1, 2, NOWHERE)).together([(1, 3), (2, 0)])
    assert list(layers.of_slots) == [2, 1, 2, 1]
