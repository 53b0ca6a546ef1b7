"""Rows of memory for what is stored, and for rows that ops look up or scatter.

A node has one usage per state, and a life for each of its values.
"""

from __future__ import annotations

import math
from itertools import compress

import numpy as np

from spmdctx.cost.memory.lives import StepMemory
from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.ir.domain import domain
from spmdctx.ir.graph import Graph
from spmdctx.ir.mesh import local_shape
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.memory.images_on_chip import images_on_chip
from spmdctx.machine.xla.memory.on_chip import OnChip, is_short
from spmdctx.machine.xla.memory.tiles import Minor, Shares, fillings, in_lanes, laid_by_rows
from spmdctx.machine.xla.narrowing import kept_share
from spmdctx.search.problem.tables import Tables
from spmdctx.search.solver.problem.problem import Life, Memory, Problem


def on_chip(topology: Topology, graph: Graph) -> OnChip:
    """Returns the bytes that the chip may hold in place of the memory."""
    return images_on_chip(graph, topology.device, OnChip.of(topology.compiler.scratch_bytes, topology.device))


class StoredRows:
    """The rows of a problem, to which lives of nodes are added.

    Args:
        tables: the tables of the problem.
        problem: the problem without memory.
        spread: the share by which what is no argument counts more.
    """

    def __init__(self, tables: Tables, problem: Problem, spread: float) -> None:
        self._tables, self._network, self._space = tables, tables.network, tables.space
        self._costs, self._edges = list(problem.costs), list(problem.edges)
        self._usages: list[FloatArray | None] = [None] * len(problem.costs)
        self._share = 1 + spread
        self._fillings, self._filled = fillings(self._space.graph, self._space.topology.device), set[int]()
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
            fills = self._fillings_of(value)
            if (
                self._usages[node] is None
                or fills
                or node in self._filled
                or (memory.narrow[value] and topology.compiler.narrows_matrix_operands)
            ):
                kept, stored = kept_share(space.graph.values[value], memory.narrow, topology), self._tables.choices[node].stored[0]
                self._use(node, kept * self._bytes(value, stored) * self._filled_up(value, stored, fills))
                self._filled |= {node} if fills else set()
            self._lives.append(Life(node, start, end + 1, part * share))

    def add_rows_of_ops(self, memory: StepMemory) -> None:
        """Adds what rows take more, while an op looks them up or scatters them, than as they are stored."""
        space, network = self._space, self._network
        for op, rows in in_lanes(space.graph, space.topology.device):
            node = network.folded.op_class[op.id]
            if node < 0:
                continue
            choices = self._tables.choices[node]
            assert choices.split is not None
            assert choices.states is not None
            naturals = dict(zip((*op.operands, *op.results), (*choices.split.operands, *choices.split.results), strict=True))
            added = np.zeros(len(choices.seconds))
            for value, minor in rows.items():
                natural = naturals[value][choices.states.split]
                added += self._bytes(value, natural) * self._filled_up(value, natural, ((minor, laid_by_rows),))
            self._use(node, added)
            self._live(node, memory.times[op.id], memory.times[op.id] + 1)

    def _use(self, node: int, usage: FloatArray) -> None:
        """Sets the usage of a node; members of a class may be kept in different types, or laid out in other tiles, and the least counts."""
        before = self._usages[node]
        self._usages[node] = usage if before is None else np.minimum(before, usage)

    def _live(self, node: int, start: int, end: int) -> None:
        """Adds a life of what is no argument."""
        self._lives.append(Life(node, start, end, self._share))

    def _bytes(self, value: int, numbers: IntArray | None) -> FloatArray:
        """Returns one device's bytes of a value for each of the sharding `numbers`; without numbers, for its whole domain."""
        known = self._space.graph.values[value]
        own = domain(self._space.mesh, known.shape)
        total = float(known.num_bytes)
        return total / (own.slices if numbers is None else own.slices[numbers])

    def _fillings_of(self, value: int) -> tuple[tuple[Minor, Shares], ...]:
        """Returns how blocks of a value are filled up."""
        return tuple([(known[value], share_of) for known, share_of in self._fillings if value in known])

    def _filled_up(self, value: int, numbers: IntArray, fills: tuple[tuple[Minor, Shares], ...]) -> FloatArray:
        """Returns how many times its bytes a value takes for each of the sharding `numbers`."""
        shape, mesh = self._space.graph.values[value].shape, self._space.mesh
        key = ("filled up", shape, fills)
        if key not in self._memo:
            blocks = [local_shape(shape, sharding, mesh) for sharding in domain(mesh, shape).shardings]
            self._memo[key] = np.array([math.prod([share_of(block, minor) for minor, share_of in fills]) for block in blocks])
        return self._memo[key][numbers]

    def _unread_node(self, value: int) -> int:
        """Adds a node of one state for an input that no op reads: every device holds it whole."""
        self._costs.append(np.zeros(1))
        self._usages.append(self._bytes(value, np.zeros(1, dtype=np.int64)))
        return len(self._costs) - 1
