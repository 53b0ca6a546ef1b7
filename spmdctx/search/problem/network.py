"""The planning problem as nodes and edges: which node hands which value to which, and how often. It knows no mesh and no seconds.

    op node    one class of ops; its state says how the results are stored
    slot node  one class of slots: where a value is stored, or over which axes it is handed on unreduced
    use node   one class of values that are read for several matrix products of one computation: they share one gathered copy

An edge carries a value from the op that makes it to its slot, and from there to its readers, `weight` times a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spmdctx.ir.analysis.incidence import Incidences, ends, executions
from spmdctx.ir.analysis.kinds import op_kinds
from spmdctx.ir.analysis.loop_sums import AT_ONCE, NOTHING_SUMMED, Later, Summed, later_reductions, loop_sums
from spmdctx.ir.arrays import BoolArray, IntArray
from spmdctx.ir.graph import Op, Role
from spmdctx.ir.primitives import ADDITIONS
from spmdctx.ir.projection import FactorAxes
from spmdctx.machine.xla.narrowing import narrow_readers, sharers, sharing_ops
from spmdctx.machine.xla.overlap import OverlapCandidates, overlap_candidates
from spmdctx.search.problem.edges import EdgeRow, EdgeRows, edge_repeats
from spmdctx.search.problem.fold import FOLDING, Fold, Folding, fold
from spmdctx.search.problem.layers import Layers, layers_of
from spmdctx.search.problem.space import NO_SLOT, Space
from spmdctx.search.problem.states import Joins

PLAIN = Joins(False, False)
_TAKES, _HANDS_ON = 1, 2
_JOINS = (PLAIN, Joins(True, False), Joins(False, True), Joins(True, True))


class Source(NamedTuple):
    """The origin of a value: a node, and the number of its result (0 for slot and use nodes)."""

    node: int
    result: int


class Carry(NamedTuple):
    """An edge: `source` hands a value to operand `position` of `target`; slot and use nodes take values at position 0.

    A `narrow` edge communicates float32 values as bfloat16.
    """

    source: Source
    target: int
    position: int
    narrow: bool


class Load(NamedTuple):
    """The load of an edge: its weight in a step, how often it carries something, and one of the values that it carries.

    The weight counts each time by the share of its communication that cannot hide. The writing of a value that moves never hides.
    """

    weight: float
    times: float
    value: int


class Node(NamedTuple):
    """A node: its sort ("op", "slot" or "use"), the op or value that stands for its class, and how often it is executed.

    A slot's `joins` are those of the op that makes it. A `terminal` op's results reach no matrix product (`overlap`); `later`
    says how its partial results are reduced.
    """

    sort: str
    member: int
    weight: int
    joins: Joins = PLAIN
    terminal: bool = False
    later: Later = AT_ONCE


@dataclass
class Network:
    """The nodes and edges of a folded graph. `carries` maps an edge to its weight and one of its values.

    `slot_nodes` maps classes of slots to their nodes. `fixed_slots` are the classes whose sharding no single op decides: arguments, tied
    and pinned values. `summed` are the sums of loops that wait for their reduction.

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

    @cached_property
    def layers(self) -> Layers | None:
        """The layers of the graph, if ops of several of them decide together."""
        return layers_of(self.space, self.folded)

    @cached_property
    def edge_kinds(self) -> list[int]:
        """For each edge a number, equal for those whose tables are equal on any mesh if the choices at their ends are."""
        space, kinds = self.space, dict[tuple[object, ...], int]()
        graph, outputs = space.graph, frozenset(space.graph.outputs)
        found = []
        for (source, _, position, narrow), (weight, times, value) in self.carries.items():
            made, known = self.nodes[source.node], graph.values[value]
            is_op = made.sort == "op"
            op = (space.kind_of[made.member], made.joins) if is_op else None
            sums = self.summed.keeps(value, is_made=is_op), space.passing[value], value in outputs
            key = (source.result, position, narrow, weight, times, known.shape, known.dtype, op, *sums)
            found.append(kinds.setdefault(key, len(kinds)))
        return found


def build_network(
    space: Space, scopes: tuple[int, ...], slot_marks: Mapping[int, int], forced: Mapping[int, FactorAxes], folding: Folding = FOLDING
) -> Network:
    """Builds the network of a space.

    Args:
        space: the graph; only its slots and kinds matter.
        scopes: per op the number of the computation that it belongs to.
        slot_marks: slots that are fixed, with a number for each way in which they are.
        forced: ops whose split is fixed.
        folding: the options of the fold.
    """
    joins = _joins(space, slot_marks)
    found = overlap_candidates(space.graph)
    terminal = _terminal(space, found)
    sums = loop_sums(space.graph)
    later = {space.graph.producers[value]: own for value, own in later_reductions(space.graph, sums).items()}
    kinds = {own: number for number, own in enumerate(dict.fromkeys(later.values()), 1)}
    op_marks = joins + 4 * terminal
    op_marks[list(forced)] = 3 + 4 * terminal[list(forced)]
    for index, own in later.items():
        op_marks[index] += 8 * kinds[own]
    folded = fold(space, op_marks, slot_marks, found.terminal, folding)
    network = Network(space, folded, scopes, summed=Summed.of(sums))
    classes, repeats = np.array(folded.op_class, dtype=np.int64), executions(space.graph)
    weights = np.zeros(len(folded.op_members), dtype=np.int64)
    np.add.at(weights, classes[classes >= 0], repeats[classes >= 0])
    for members, weight in zip(folded.op_members, weights.tolist(), strict=True):
        first = members[0]
        network.nodes.append(Node("op", first, weight, _JOINS[joins[first]], bool(terminal[first]), later.get(first, AT_ONCE)))
    for slot_class, standalone in enumerate(_standalone(space, folded, slot_marks)):
        if standalone:
            network.fixed_slots.add(slot_class)
        network.slot_nodes[slot_class] = len(network.nodes)
        handed = PLAIN if standalone else _joins_of_maker(network, slot_class)
        network.nodes.append(Node("slot", folded.slot_members[slot_class][0], 1, handed))
    _add_uses(network)
    _add_carries(network, found)
    return network


def _standalone(space: Space, folded: Fold, slot_marks: Mapping[int, int]) -> list[bool]:
    """Returns for each class of slots whether no single op decides its sharding."""
    count, slot_of = len(space.graph.values), np.array(space.slot_of, dtype=np.int64)
    is_given = np.array([value.role is not Role.INTERMEDIATE for value in space.graph.values], dtype=bool)
    makers = np.bincount(slot_of, minlength=count) + np.bincount(slot_of[is_given], minlength=count)
    alone = makers > 1
    made = np.zeros(count, dtype=bool)
    made[slot_of[list(space.graph.producers)]] = True
    alone |= ~made
    alone[list(slot_marks)] = True
    return [bool(alone[own[0]]) for own in folded.slot_members]


def _joins_of_maker(network: Network, slot_class: int) -> Joins:
    """Returns whether the values of a class of slots that one op makes may be handed on unreduced."""
    maker = network.space.graph.producers[network.folded.slot_members[slot_class][0]]
    node = network.folded.op_class[maker]
    return network.nodes[node].joins if node >= 0 else PLAIN


def _terminal(space: Space, found: OverlapCandidates) -> IntArray:
    """Returns for each op 1 if its first result reaches no matrix product, else 0."""
    every = ends(space.graph)
    terminal = np.frombuffer(found.terminal, dtype=np.uint8).astype(np.int64)
    return np.where(every.num_results > 0, terminal[every.first_results], 0)


def _joins(space: Space, slot_marks: Mapping[int, int]) -> IntArray:
    """Finds the additions that may take terms unreduced and the ops that may hand them on; returns for each op its place in `_JOINS`."""
    graph, every = space.graph, ends(space.graph)
    found = np.zeros(len(graph.ops), dtype=np.int64)
    if not space.topology.compiler.merges_partial_sums:
        return found
    alone = _read_once(space, slot_marks)
    is_lone = np.repeat(every.num_results == 1, every.num_operands + every.num_results) & (every.places == every.num_operands[every.ops])
    results, makers = every.values[is_lone], every.ops[is_lone]
    sums = np.zeros(len(graph.values), dtype=bool)
    sums[results] = alone[results] & op_kinds(graph).flags(lambda op: _reduces(space, op))[makers]
    is_addition = op_kinds(graph).flags(lambda op: op.primitive in ADDITIONS and len(op.results) == 1)
    for index in np.flatnonzero(is_addition).tolist():
        (first, second), (value,) = graph.ops[index].operands, graph.ops[index].results
        if first != second and first >= 0 and second >= 0 and sums[first] and sums[second]:
            found[index] |= _TAKES
            found[[graph.producers[first], graph.producers[second]]] |= _HANDS_ON
            sums[value] = alone[value]
    return found


def _read_once(space: Space, slot_marks: Mapping[int, int]) -> BoolArray:
    """Returns for each value whether it is read once, and neither tied to another one, nor marked, nor free to place."""
    count, slot_of, every = len(space.graph.values), np.array(space.slot_of, dtype=np.int64), space.incidences
    reads = np.bincount(every.values[~every.is_result], minlength=count)
    returned = [value for value in space.graph.outputs if value >= 0]
    reads += np.bincount(np.array(returned, dtype=np.int64), minlength=count)
    alone = np.bincount(slot_of, minlength=count) == 1
    alone[list(slot_marks)] = False
    alone[list(space.free_slots)] = False
    found: BoolArray = (reads == 1) & alone[slot_of]
    return found


def _reduces(space: Space, op: Op) -> bool:
    direct = op.primitive != "gather" or space.topology.compiler.sinks_slices
    return direct and op.rule.combiner == "add" and any(kind.value == "reduction" for kind in op.rule.kinds)


def _add_uses(network: Network) -> None:
    """Adds a use node for every value that several matrix products of one computation read."""
    space, folded, scopes = network.space, network.folded, network.scopes
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for op in sharing_ops(space.graph):
        for position, slot in enumerate(space.op_slots[op.id][: len(op.operands)]):
            if slot != NO_SLOT and slot not in space.free_slots:
                readers.setdefault((op.operands[position], scopes[op.id]), []).append((folded.op_class[op.id], position))
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


def _add_carries(network: Network, found: OverlapCandidates) -> None:
    """Adds one edge for all rows with the same ends, in the order of the ops that first have them."""
    for source, result, target, position, slim, weight, times, value in _edge_rows(network, found).summed():
        network.carries[Carry(Source(source, result), target, position, slim)] = Load(weight, times, value)


def _edge_rows(network: Network, found: OverlapCandidates) -> EdgeRows:
    """Returns a row for each operand, which comes from its slot, and one for each result, which goes to its slot.

    Each use node adds one row, from the slot to the use.
    """
    space, folded = network.space, network.folded
    every = space.incidences
    at_op = np.array(folded.op_class, dtype=np.int64)[every.ops]
    slot_nodes = np.array(list(network.slot_nodes.values()), dtype=np.int64)
    at_slot = slot_nodes[np.array(folded.slot_class, dtype=np.int64)[every.slots]]
    made = every.is_result
    reading, making = edge_repeats(space.graph)
    times = np.where(made, making[every.ops], reading[every.ops]).astype(np.float64)
    exposed = np.where(np.frombuffer(found.weights, dtype=np.uint8)[:-1] != 0, 1.0 - space.topology.compiler.gather_overlap, 1.0)
    columns = EdgeRows(
        np.where(made, at_op, at_slot),
        np.where(made, every.positions, 0),
        np.where(made, at_slot, at_op),
        np.where(made, 0, every.positions),
        _is_narrow(space, every),
        times * exposed[every.values],
        times,
        every.values,
    )
    kept = at_op >= 0
    return _by_uses(network, columns.where(kept), every.where(kept))


def _is_narrow(space: Space, every: Incidences) -> BoolArray:
    """Returns for each incidence whether an op reads a float32 value as bfloat16, or all that read its result do."""
    if not space.topology.compiler.narrows_matrix_operands:
        return np.zeros(len(every.ops), dtype=bool)
    is_wide = np.array([value.dtype == "float32" for value in space.graph.values], dtype=bool)
    by_op = (np.frombuffer(narrow_readers(space.graph), dtype=np.uint8) == 1)[every.ops]
    reads = ~every.is_result
    # A value that nothing reads, or that the step returns, keeps its type.
    is_read, stays = np.zeros_like(is_wide), np.zeros_like(is_wide)
    is_read[every.values[reads]] = True
    stays[every.values[reads & ~by_op]] = True
    stays[[value for value in space.graph.outputs if value >= 0]] = True
    found: BoolArray = is_wide[every.values] & np.where(reads, by_op, (is_read & ~stays)[every.values])
    return found


def _by_uses(network: Network, rows: EdgeRows, every: Incidences) -> EdgeRows:
    """Redirects the operands whose values have a use node: the value goes to the use once, and from there to its readers."""
    if not network.uses:
        return rows
    shares = np.frombuffer(sharers(network.space.graph), dtype=np.uint8).astype(bool)
    places: list[int] = []
    feeding: dict[tuple[int, int], EdgeRow] = {}
    for place in np.flatnonzero(shares[every.ops] & ~every.is_result).tolist():
        key = (int(every.values[place]), network.scopes[every.ops[place]])
        use = network.uses.get(key)
        if use is None:
            continue
        if key not in feeding:
            places.append(place)
            source, result = int(rows.sources[place]), int(rows.results[place])
            load = float(rows.weights[place]), float(rows.times[place]), key[0]
            feeding[key] = EdgeRow(source, result, use, 0, bool(rows.narrow[place]), *load)
        rows.sources[place], rows.results[place] = use, 0
    return rows.before(places, list(feeding.values()))
