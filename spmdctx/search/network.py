"""The planning problem as nodes and edges: who hands which value to whom, how often. Knows no mesh and no seconds.

    op node    one class of ops; its results are stored as its state says
    slot node  one class of slots: where a value is stored. What is handed on unreduced has none; its op decides
    use node   one class of values that several matrix products of one computation read: they share what is gathered for them

An edge carries a value from the node that stores it to one that takes it, `weight` times a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from spmdctx.ir import Role
from spmdctx.search.accumulation import AT_ONCE, NOTHING_SUMMED, Later, Summed, later_reductions, loop_sums
from spmdctx.search.fold import Fold, fold
from spmdctx.search.narrowing import narrow_readers
from spmdctx.search.overlap import Sides, sides
from spmdctx.search.space import MATRIX_PRODUCTS, NO_SLOT, Space
from spmdctx.search.states import ADDITIONS, Joins
from spmdctx.search.transfer import FactorAxes
from spmdctx.search.turns import made_repeats, read_repeats

PLAIN = Joins(False, False)


class Source(NamedTuple):
    """Where a value is stored: a node, and which of its results it is (0 for slot and use nodes)."""

    node: int
    result: int


class Carry(NamedTuple):
    """An edge: `source` hands a value to operand `position` of `target`; slot and use nodes take at position 0.

    A `narrow` one communicates float32 values as bfloat16.
    """

    source: Source
    target: int
    position: int
    narrow: bool


class Load(NamedTuple):
    """What an edge carries: how often in a step, and one of the values."""

    weight: float
    value: int


class Node(NamedTuple):
    """A node: its sort ("op", "slot" or "use"), the op or value that stands for its class, and how often it is executed.

    A `terminal` op's results reach no matrix product (overlap.Sides); `later` says how its partial results are reduced.
    """

    sort: str
    member: int
    weight: int
    joins: Joins = PLAIN
    terminal: bool = False
    later: Later = AT_ONCE


@dataclass
class Network:
    """Nodes and edges of a folded graph. `carries` maps an edge to its weight and a value that it carries.

    `slot_nodes` maps classes of slots to their nodes; `fixed_slots` are those that no single op decides: arguments, tied and pinned
    values. `summed` are the sums of loops that wait for their reduction.

    The weight counts executions, each by the share of its time that cannot hide behind compute.
    """

    space: Space
    folded: Fold
    scopes: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list)
    carries: dict[Carry, Load] = field(default_factory=dict)
    slot_nodes: dict[int, int] = field(default_factory=dict)
    fixed_slots: set[int] = field(default_factory=set)
    uses: dict[tuple[int, int], int] = field(default_factory=dict)
    summed: Summed = NOTHING_SUMMED


def build_network(space: Space, scopes: tuple[int, ...], slot_marks: Mapping[int, int], forced: Mapping[int, FactorAxes]) -> Network:
    """The network of a space.

    Args:
        space: the graph; only its slots and kinds matter.
        scopes: per op the number of the computation that it belongs to.
        slot_marks: slots that are fixed, with a number for each way in which they are.
        forced: ops whose split is fixed.
    """
    joins = _joins(space, slot_marks)
    found = sides(space.graph)
    terminal = [bool(op.results) and bool(found.terminal[op.results[0]]) for op in space.graph.ops]
    sums = loop_sums(space.graph)
    later = {space.graph.producers[value]: own for value, own in later_reductions(space.graph, sums).items()}
    kinds = {own: number for number, own in enumerate(dict.fromkeys(later.values()), 1)}
    op_marks = [
        8 * kinds.get(later.get(index, AT_ONCE), 0) + 4 * last + (3 if index in forced else own.takes + 2 * own.hands_on)
        for index, (own, last) in enumerate(zip(joins, terminal, strict=True))
    ]
    folded = fold(space, op_marks, slot_marks, found.terminal)
    network = Network(space, folded, scopes, summed=Summed.of(sums))
    ops = space.graph.ops
    for members in folded.op_members:
        first = members[0]
        weight = sum([ops[member].repeats for member in members])
        network.nodes.append(Node("op", first, weight, joins[first], terminal[first], later.get(first, AT_ONCE)))
    for slot_class, standalone in enumerate(_standalone(space, folded, slot_marks)):
        if standalone:
            network.fixed_slots.add(slot_class)
        if standalone or not _is_handed_on(network, slot_class):
            network.slot_nodes[slot_class] = len(network.nodes)
            network.nodes.append(Node("slot", folded.slot_members[slot_class][0], 1))
    _add_uses(network)
    _add_carries(network, found)
    return network


def _standalone(space: Space, folded: Fold, slot_marks: Mapping[int, int]) -> list[bool]:
    """Per class of slots: whether no single op decides its sharding."""
    makers = [0] * len(space.graph.values)
    for slot, value in zip(space.slot_of, space.graph.values, strict=True):
        makers[slot] += 1
        if value.role is not Role.INTERMEDIATE:
            makers[slot] += 1
    made = [False] * len(makers)
    for op in space.graph.ops:
        for result in op.results:
            made[space.slot_of[result]] = True
    return [makers[own[0]] > 1 or not made[own[0]] or own[0] in slot_marks for own in folded.slot_members]


def _is_handed_on(network: Network, slot_class: int) -> bool:
    """Whether the values of a class of slots may be handed on unreduced."""
    maker = network.space.graph.producers[network.folded.slot_members[slot_class][0]]
    node = network.folded.op_class[maker]
    return node >= 0 and network.nodes[node].joins.hands_on


def _joins(space: Space, slot_marks: Mapping[int, int]) -> list[Joins]:
    """Which additions may take their terms unreduced, and which ops may so hand them on."""
    graph = space.graph
    if not space.topology.merges_partial_sums:
        return [PLAIN] * len(graph.ops)
    reads = [0] * len(graph.values)
    for op in graph.ops:
        for value in op.operands:
            reads[value] += 1
    for value in graph.outputs:
        reads[value] += 1
    sizes = [0] * len(graph.values)
    for slot in space.slot_of:
        sizes[slot] += 1
    sums = [False] * len(graph.values)
    takes = [False] * len(graph.ops)
    for index, op in enumerate(graph.ops):
        if len(op.results) != 1:
            continue
        if op.primitive in ADDITIONS:
            first, second = op.operands
            takes[index] = first != second and first >= 0 and second >= 0 and sums[first] and sums[second]
        (value,) = op.results
        slot = space.slot_of[value]
        alone = reads[value] == 1 and sizes[slot] == 1 and slot not in slot_marks and slot not in space.loose_slots
        sums[value] = alone and (takes[index] or _reduces(space, index))
    hands_on = [False] * len(graph.ops)
    for index, op in enumerate(graph.ops):
        if takes[index]:
            for value in op.operands:
                hands_on[graph.producers[value]] = True
    return [Joins(take, hand) for take, hand in zip(takes, hands_on, strict=True)]


def _reduces(space: Space, index: int) -> bool:
    op = space.graph.ops[index]
    direct = op.primitive != "gather" or space.topology.sinks_slices
    return direct and op.rule.combiner == "add" and any(kind.value == "reduction" for kind in op.rule.kinds)


def _source(network: Network, value: int) -> Source:
    slot = network.space.slot_of[value]
    node = network.slot_nodes.get(network.folded.slot_class[slot])
    if node is not None:
        return Source(node, 0)
    op = network.space.graph.producers[value]
    return Source(network.folded.op_class[op], network.space.graph.ops[op].results.index(value))


def _add_uses(network: Network) -> None:
    """Use nodes for values that more than one matrix product of a computation reads."""
    space, folded, scopes = network.space, network.folded, network.scopes
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, op in enumerate(space.graph.ops):
        if op.primitive in MATRIX_PRODUCTS:
            for position, slot in enumerate(space.op_slots[index][: len(op.operands)]):
                if slot != NO_SLOT and slot not in space.loose_slots:
                    readers.setdefault((op.operands[position], scopes[index]), []).append((folded.op_class[index], position))
    classes: dict[tuple[object, ...], int] = {}
    for (value, scope), own in readers.items():
        if len(own) < 2:
            continue
        slot_class = folded.slot_class[space.slot_of[value]]
        key = (slot_class, *sorted(own))
        node = classes.get(key)
        if node is None:
            node = classes[key] = len(network.nodes)
            network.nodes.append(Node("use", value, 1))
        network.uses[value, scope] = node


_Loads = dict[tuple[int, int, int, int, bool], list[float]]
"""Weight and value by the parts of a Carry: plain, because this is filled once per operand of the program."""


def _add_carries(network: Network, found: Sides) -> None:
    space, folded, scopes = network.space, network.folded, network.scopes
    loose, ops = space.loose_slots, space.graph.ops
    narrow = narrow_readers(space.graph) if space.topology.narrows_matrix_operands else bytearray(len(ops))
    loads: _Loads = {}
    sources: dict[int, Source] = {}
    fed: set[tuple[int, int]] = set()
    exposed = [1.0 - space.topology.gather_overlap if weight else 1.0 for weight in found.weights]
    targets = {slot for own in network.slot_nodes for slot in folded.slot_members[own]}
    for index, op in enumerate(ops):
        node = folded.op_class[index]
        if node < 0:
            continue
        product, taken = op.primitive in MATRIX_PRODUCTS, read_repeats(space.graph, op)
        for position, (value, slot) in enumerate(zip(op.operands, space.op_slots[index], strict=False)):
            if slot == NO_SLOT or slot in loose:
                continue
            source = sources.get(value)
            if source is None:
                source = sources[value] = _source(network, value)
            slim = narrow[index] == 1 and space.graph.values[value].dtype == "float32"
            weight = taken * exposed[value]
            use = network.uses.get((value, scopes[index])) if product else None
            if use is not None:
                if (value, scopes[index]) not in fed:
                    fed.add((value, scopes[index]))
                    _count(loads, (*source, use, 0, slim), weight, value)
                source = Source(use, 0)
            _count(loads, (*source, node, position, slim), weight, value)
        if not targets.isdisjoint(space.op_slots[index][len(op.operands) :]):
            _add_results(network, loads, index, exposed)
    for (node, result, target, position, slim), (total, member) in loads.items():
        network.carries[Carry(Source(node, result), target, position, slim)] = Load(total, int(member))


def _add_results(network: Network, loads: _Loads, index: int, exposed: list[float]) -> None:
    """Edges from an op to the slots that decide where its results are stored."""
    space, folded = network.space, network.folded
    op, slots = space.graph.ops[index], space.op_slots[index]
    made = made_repeats(space.graph, op)
    for result, value in enumerate(op.results):
        slot = slots[len(op.operands) + result]
        target = network.slot_nodes.get(folded.slot_class[slot])
        if target is not None and slot not in space.loose_slots:
            _count(loads, (folded.op_class[index], result, target, 0, False), made * exposed[value], value)


def _count(loads: _Loads, carry: tuple[int, int, int, int, bool], weight: float, value: int) -> None:
    known = loads.get(carry)
    if known is None:
        loads[carry] = [weight, value]
    else:
        known[0] += weight
