"""The memory of a planning problem: the bytes that each node occupies in each state, and the times at which it does.

The rows are the search's lower bound of the bill: `cost.price.memory` may count more at an op, and never less.

A node has one usage per state. Other memory that its state causes needs an auxiliary node, which costs nothing and is joined to the
node by an edge of zeros and infinities. Such memory is the copy that a use gathers, and on request the copies that an op makes for itself.

Short-lived values are partly on the chip instead of in memory. Therefore every op has two rows. The first counts all live values and
adds the chip's bytes to the limit; the second leaves out the values that may be on the chip.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from spmdctx.cost.memory.lives import Peak, StepMemory
from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.ir.domain import domain
from spmdctx.ir.graph import Graph, item_bytes
from spmdctx.ir.primitives import MATRIX_PRODUCTS
from spmdctx.ir.rule import FactorKind
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.memory.images_on_chip import images_on_chip
from spmdctx.machine.xla.memory.on_chip import OnChip, is_short
from spmdctx.machine.xla.narrowing import NARROW_BYTES, kept_share
from spmdctx.search.problem.network import Carry, Network, Source
from spmdctx.search.problem.tables import Tables
from spmdctx.search.solver.problem.problem import Edge, Life, Memory, Problem

Passing = Carry | Source
"""A source of copies for one op alone: an edge into an op, an edge from an op to a slot, or a result that may be partial."""


def with_memory(
    tables: Tables,
    problem: Problem,
    memory: StepMemory,
    limit: float,
    passing: Collection[Passing] = (),
    *,
    only_stored: bool = False,
    spread: float = 0.0,
) -> Problem:
    """Returns the problem with the budget `limit` in bytes; its states begin with those of the problem without a budget.

    The problem counts values as they are stored. Unless `only_stored`, it also counts gathered copies, and the copies of `passing`. What
    is no argument counts more by the share `spread`; so does the next value of an argument, which is in the same slot. The chip's share
    (`on_chip`), `spread` included, is part of the limit.
    """
    builder = _RowBuilder(tables, problem, spread)
    builder.add_values(memory)
    if not only_stored:
        builder.add_copies(memory)
        builder.add_own_copies(memory, passing)
        builder.add_rows_off_chip(memory)
    return builder.problem(limit)


def on_chip(topology: Topology, graph: Graph) -> OnChip:
    """Returns the bytes that the chip may hold in place of the memory."""
    return images_on_chip(graph, topology.device, OnChip.of(topology.compiler.scratch_bytes, topology.device))


def op_at(memory: StepMemory, time: int) -> int:
    """Returns the op that runs at a time of the problem; -1 if there is none."""
    return time if time < 0 else time % max(len(memory.times), 1)


def completed(problem: Problem, states: Sequence[int]) -> tuple[int, ...]:
    """Completes the states of the first nodes of a problem with memory by the cheapest states of its auxiliary nodes."""
    found, totals = list(states), [np.array(costs) for costs in problem.costs[len(states) :]]
    for left, right, table in problem.edges:
        if left < len(found) <= right:
            totals[right - len(found)] += table[found[left]]
    return (*found, *(int(total.argmin()) for total in totals))


def passing_at(network: Network, memory: StepMemory, time: int) -> list[Passing]:
    """Lists the edges and results that may have copies in memory for one op alone at this time."""
    ops, nodes = network.space.graph.ops, network.nodes
    # The set is only tested for membership, so its order does not matter.
    classes = {network.folded.op_class[op.id] for op in ops if memory.runs[op.id] <= time <= memory.times[op.id] + 1}
    found: list[Passing] = []
    for carry in network.carries:
        if carry.target in classes or (carry.source.node in classes and nodes[carry.target].sort == "slot"):
            found.append(carry)
    for node in sorted(classes - {-1}):
        op = ops[nodes[node].member]
        if FactorKind.REDUCTION in op.rule.kinds:
            found += [Source(node, result) for result in range(len(op.results))]
    return found


def counted_bytes(problem: Problem, states: Sequence[int]) -> float:
    """Returns the most bytes alive at once in a choice of states, as the problem counts them."""
    memory = problem.memory
    if memory is None or not memory.lives:
        return 0.0
    lives = np.array([(start, end) for _, start, end, _ in memory.lives], dtype=np.int64)
    sizes = np.array([share * memory.usages[node][states[node]] for node, _, _, share in memory.lives])
    change = np.zeros(lives[:, 1].max() + 1)
    np.add.at(change, lives[:, 0], sizes)
    np.subtract.at(change, lives[:, 1], sizes)
    return float(np.cumsum(change).max())


def least_peak(problem: Problem) -> Peak:
    """Returns the time at which most bytes are alive if every node occupies as little as it can, and those bytes."""
    memory = problem.memory
    if memory is None or not memory.lives:
        return Peak(0, 0)
    lives = np.array([life[:3] for life in memory.lives], dtype=np.int64)
    least = np.array([usage.min() for usage in memory.usages])[lives[:, 0]] * [life.share for life in memory.lives]
    change = np.zeros(lives[:, 2].max() + 1)
    np.add.at(change, lives[:, 1], least)
    np.subtract.at(change, lives[:, 2], least)
    alive = np.cumsum(change)
    return Peak(int(alive.argmax()), int(alive.max()))


def _may_be_elsewhere(memory: StepMemory) -> set[int]:
    """Returns the products that may run last, unless they run last in any case."""
    last = len(memory.times) - 1
    return {one.op for one in memory.gradients if memory.times[one.op] != last}


_Way = list[tuple[int, BoolArray]]
_Readers = frozenset[tuple[int, int]]
"""The nodes that read a value, each with the position at which it takes it."""


class _Reader(NamedTuple):
    time: int
    node: int
    position: int


class _RowBuilder:
    def __init__(self, tables: Tables, problem: Problem, spread: float) -> None:
        self._tables, self._network, self._space = tables, tables.network, tables.space
        self._costs, self._edges = list(problem.costs), list(problem.edges)
        self._usages: list[FloatArray | None] = [None] * len(problem.costs)
        self._share = 1 + spread
        self._auxiliary: dict[tuple[object, ...], int] = {}
        self._into_use = {carry.target: carry for carry in self._network.carries if self._network.nodes[carry.target].sort == "use"}
        self._slices: dict[tuple[object, ...], BoolArray] = {}
        # Tables are shared by the `id` of their arrays, so the arrays must stay alive.
        self._kept: list[object] = []
        self._lives: list[Life] = []
        self._memo: dict[tuple[object, ...], FloatArray] = {}

    def problem(self, limit: float) -> Problem:
        """Builds the problem from all that was added."""
        nothing = [np.zeros(len(costs)) if usage is None else usage for costs, usage in zip(self._costs, self._usages, strict=True)]
        return Problem(tuple(self._costs), tuple(self._edges), Memory(tuple(nothing), tuple(self._lives), limit))

    def add_rows_off_chip(self, memory: StepMemory) -> None:
        """Adds the second rows: the same lives without those that may be on the chip, and in their place all bytes that the chip holds."""
        num_ops, chip = max(len(memory.times), 1), on_chip(self._space.topology, self._space.graph)
        if not chip.total_bytes or not self._lives:
            return
        table = np.array([life[:3] for life in self._lives], dtype=np.int64)
        least = np.array([0.0 if usage is None else usage.min() for usage in self._usages])[table[:, 0]]
        least *= [min(life.share / self._share, 1.0) for life in self._lives]  # Narrow copies are smaller than their values.
        stays = ~(is_short(table[:, 1], table[:, 2] - 1, num_ops) & (least <= chip.largest_bytes))
        kept = list(compress(self._lives, stays.tolist()))
        self._costs.append(np.zeros(1))
        self._usages.append(np.array([float(chip.total_bytes)]))
        self._live(len(self._costs) - 1, num_ops, 2 * num_ops)
        self._lives += [Life(node, start + num_ops, end + num_ops, share) for node, start, end, share in kept]

    def add_values(self, memory: StepMemory) -> None:
        """Adds every value that exists in memory, where it is stored."""
        network, space, topology = self._network, self._space, self._space.topology
        stacks = memory.stacks if topology.compiler.narrows_matrix_operands else ()
        arguments = set(space.graph.inputs)
        for value, start, end, part in (*((*life, 1.0) for life in memory.lives), *stacks):
            slot = space.slot_of[value]
            if slot in space.free_slots:
                continue
            slot_class = network.folded.slot_class[slot]
            if slot_class < 0:
                self._lives.append(Life(self._unread_node(value), start, end + 1))
                continue
            node = network.slot_nodes[slot_class]
            # Each argument counts as one once; what else lives of it are copies.
            share = 1.0 if value in arguments else self._share
            arguments.discard(value)
            usage = self._usages[node]
            if usage is None or (memory.narrow[value] and topology.compiler.narrows_matrix_operands):
                kept = kept_share(space.graph.values[value], memory.narrow, topology)
                size = kept * self._bytes(value, self._tables.choices[node].stored[0])
                # Members of a class may be kept in different types.
                self._usages[node] = size if usage is None else np.minimum(usage, size)
            self._lives.append(Life(node, start, end + 1, part * share))

    def _live(self, node: int, start: int, end: int) -> None:
        """Adds a life of what is no argument."""
        self._lives.append(Life(node, start, end, self._share))

    def _bytes(self, value: int, numbers: IntArray | None) -> FloatArray:
        """Returns one device's bytes of a value for each of the sharding `numbers`; without numbers, for its whole domain."""
        known = self._space.graph.values[value]
        own = domain(self._space.mesh, known.shape)
        total = float(known.num_bytes)
        return total / (own.slices if numbers is None else own.slices[numbers])

    def _unread_node(self, value: int) -> int:
        """Adds a node of one state for an input that no op reads: every device holds it whole."""
        self._costs.append(np.zeros(1))
        self._usages.append(self._bytes(value, np.zeros(1, dtype=np.int64)))
        return len(self._costs) - 1

    def _add(self, key: tuple[object, ...], node: int, table: FloatArray) -> int:
        auxiliary = self._auxiliary[key] = len(self._costs)
        self._costs.append(np.zeros(table.shape[1]))
        self._usages.append(None)
        self._edges.append(Edge(node, auxiliary, table))
        return auxiliary

    def add_copies(self, memory: StepMemory) -> None:
        """Adds the copies that uses gather, from the first to the last product that takes them; those that may run last are left out."""
        network = self._network
        readers: dict[tuple[int, int], list[_Reader]] = {}
        moves = _may_be_elsewhere(memory)
        for op, scope in zip(self._space.graph.ops, network.scopes, strict=True):
            if op.primitive in MATRIX_PRODUCTS and op.id not in moves:
                for position, value in enumerate(op.operands):
                    if (value, scope) in network.uses:
                        own = _Reader(memory.times[op.id], network.folded.op_class[op.id], position)
                        readers.setdefault((value, scope), []).append(own)
        for key, node in network.uses.items():
            if key not in readers:
                continue
            times = [reader.time for reader in readers[key]]
            first, last = (frozenset(own[1:] for own in readers[key] if own.time == time) for time in (min(times), max(times)))
            self._live(self._gathered_node(node, key[0], (first, last)), min(times), max(times) + 1)

    def _gathered_node(self, node: int, value: int, ends: tuple[_Readers, _Readers]) -> int:
        """Adds the node of a use's gathered copy.

        It occupies nothing where it is a slice of the stored value, or where the first or the last readers take another sharding.
        """
        key = ("gathered", node, *ends)
        known = self._auxiliary.get(key)
        if known is not None:
            return known
        carry = self._into_use[node]
        size = self._copied_bytes(value, carry)
        ways: list[_Way] = [[(carry.source.node, self._is_slice(carry.source, value))]]
        for readers in dict.fromkeys(ends):
            others = [(reader, self._tables.choices[reader].taken[position]) for reader, position in sorted(readers)]
            ways.append([(reader, taken[:, None] != np.arange(len(size))) for reader, taken in others])
        return self._excused(key, node, self._tables.choices[node].taken[0], size, ways)

    def add_own_copies(self, memory: StepMemory, passing: Collection[Passing]) -> None:
        """Adds the copies that ops make for themselves while they run: operands as ops take them, results before they are stored."""
        folded, nodes, ops = self._network.folded, self._network.nodes, self._space.graph.ops
        seen: dict[tuple[int, int], int] = {}
        moves = _may_be_elsewhere(memory)
        for carry in passing:
            if isinstance(carry, Source):
                partial = self._partial_node(carry, memory)
                for op in folded.op_members[carry.node]:
                    self._live(partial, memory.runs[op], memory.times[op] + 1)
                continue
            value = self._network.carries[carry].value
            into_op = nodes[carry.target].sort == "op"
            members = folded.op_members[carry.target if into_op else carry.source.node]
            if into_op or not memory.materialized[value]:
                copy = self._copy_node(carry, value, into_op)
                for op in members:
                    if op in moves and into_op:
                        continue
                    # Ops that run together may read one copy.
                    taken = ops[op].operands[carry.position] if into_op else ops[op].results[carry.source.result]
                    if seen.setdefault((taken, memory.times[op]), op) == op:
                        self._live(copy, memory.times[op], memory.times[op] + 1)
            if not into_op:
                made = self._made_node(carry, value)
                for op in members:
                    self._live(made, memory.runs[op], memory.runs[op] + 1)

    def _copy_node(self, carry: Carry, value: int, into_op: bool) -> int:
        """Adds the node of the copy that the target of an edge makes.

        It occupies nothing where it is a slice of the stored value, or where another copy has the same sharding.
        """
        node, position, key = carry.target, carry.position, ("copy", carry)
        known = self._auxiliary.get(key)
        if known is not None:
            return known
        taken = self._tables.choices[node].taken[position]
        ways: list[_Way] = [[(carry.source.node, self._is_slice(carry.source, value))]]
        if into_op:
            numbers = np.arange(len(domain(self._space.mesh, self._space.graph.values[value].shape)))
            gathered = self._into_use.get(carry.source.node)
            if gathered is not None:
                # Copies are made from the stored value, whatever other uses gather.
                ways.append([(gathered.source.node, self._is_slice(gathered.source, value))])
            for use in self._uses_beside(carry):
                ways.append([(use, self._tables.choices[use].taken[0][:, None] == numbers)])
            for other in self._earlier(carry):
                own = self._tables.choices[node].taken[other]
                ways.append([(node, (own == taken)[:, None] & (taken[:, None] == numbers))])
        return self._excused(key, node, taken, self._copied_bytes(value, carry), ways)

    def _uses_beside(self, carry: Carry) -> list[int]:
        """Returns the use nodes of the value on an edge, except the one that the edge comes from."""
        network, ops = self._network, self._space.graph.ops
        if not network.uses:
            return []
        keys = [(ops[op].operands[carry.position], network.scopes[op]) for op in network.folded.op_members[carry.target]]
        return sorted({network.uses[key] for key in keys if key in network.uses} - {carry.source.node})

    def _earlier(self, carry: Carry) -> list[int]:
        """Lists the earlier positions at which the target of an edge takes the same value."""
        operands = self._space.graph.ops[self._network.nodes[carry.target].member].operands
        return [position for position in range(carry.position) if operands[position] == operands[carry.position]]

    def _is_slice(self, source: Source, value: int) -> BoolArray:
        """Returns whether no bytes move from the stored sharding to another one, for each [state, sharding]."""
        stored, shape = self._tables.choices[source.node].stored[source.result], self._space.graph.values[value].shape
        key = ("slice", id(stored), shape)
        known = self._slices.get(key)
        if known is None:
            known = self._slices[key] = self._tables.reshard_s(shape, 1)[stored] == 0.0
        return known

    def _copied_bytes(self, value: int, carry: Carry) -> FloatArray:
        """Returns the bytes of a copy of a value for each sharding."""
        known, topology = self._space.graph.values[value], self._space.topology
        is_result = self._network.nodes[carry.target].sort == "slot"
        # A result on its way is narrow if all of its readers are.
        narrow = carry.narrow or (is_result and topology.compiler.narrows_matrix_operands and known.dtype == "float32")
        return self._bytes(value, None) * (NARROW_BYTES / item_bytes(known.dtype) if narrow else 1.0)

    def _made_node(self, carry: Carry, value: int) -> int:
        """Adds the node of an op's result before it is moved to where it is stored.

        It occupies nothing where the op makes the result in the sharding in which it is stored.
        """
        key, (node, result) = ("made", carry), carry.source
        known = self._auxiliary.get(key)
        if known is not None:
            return known
        stored, (before, made) = self._tables.choices[carry.target].taken[0], self._made(node, result)
        # `_partial_node` counts a partial result that is reduced in its own place.
        kinds, kind = np.unique(np.where(before == made, -1, made), return_inverse=True)
        size = np.where(kinds >= 0, self._bytes(value, None)[kinds], 0.0)
        return self._excused(key, node, kind, size, [[(carry.target, stored[:, None] == kinds)]])

    def _partial_node(self, source: Source, memory: StepMemory) -> int:
        """Adds the node of an op's partial result, which is in memory before its reduction unless the op reduces it in place."""
        key = ("partial", source)
        known = self._auxiliary.get(key)
        if known is not None:
            return known
        value = self._space.graph.ops[self._network.nodes[source.node].member].results[source.result]
        size, (before, made) = self._bytes(value, None), self._made(*source)
        kinds, kind = np.unique(np.where((before == made) & bool(memory.settled[value]), -1, before), return_inverse=True)
        return self._excused(key, source.node, kind, np.where(kinds >= 0, size[kinds], 0.0), [])

    def _excused(self, key: tuple[object, ...], node: int, numbers: IntArray, size: FloatArray, ways: Sequence[_Way]) -> int:
        """Adds an auxiliary node for one whose states have `numbers`: each number once for every way to take no bytes, then with bytes.

        A way is open where all of its nodes, each with a table of its states by numbers, allow it.
        """
        same = np.where(np.eye(len(size), dtype=bool), 0.0, np.inf)[numbers]
        copy = self._add(key, node, self._shared(("same", id(numbers), len(size), len(ways)), np.hstack([same] * (len(ways) + 1))))
        self._usages[copy] = np.concatenate([*[np.zeros(len(size))] * len(ways), size])
        self._kept.append(numbers)
        for place, way in enumerate(ways):
            for other, allowed in way:
                shared = ("way", id(allowed), place, len(ways))
                parts = [np.zeros(allowed.shape)] * (len(ways) + 1)
                parts[place] = np.where(allowed, 0.0, np.inf)
                self._edges.append(Edge(other, copy, self._shared(shared, np.hstack(parts))))
                self._kept.append(allowed)
        return copy

    def _made(self, node: int, result: int) -> tuple[IntArray, IntArray]:
        """Returns for each state of an op the sharding of a partial result before its reduction (-1 if it is not partial), and after it."""
        choices = self._tables.choices[node]
        assert choices.split is not None
        assert choices.states is not None
        kinds = self._space.graph.ops[self._network.nodes[node].member].rule.kinds
        summed = [factor for factor, kind in enumerate(kinds) if kind is FactorKind.REDUCTION]
        is_partial = np.asarray((choices.split.rows[:, summed] > 0).any(axis=1))
        natural = choices.split.results[result][choices.states.split]
        return np.where(is_partial[choices.states.split], natural, -1), choices.stored[result]

    def _shared(self, key: tuple[object, ...], table: FloatArray) -> FloatArray:
        return self._memo.setdefault(key, table)
