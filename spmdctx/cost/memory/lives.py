"""Finds when each value of a step is in memory, independent of shardings, and counts the bytes alive at each op.

With the values `v` that are materialised, each alive from op `start(v)` to op `end(v)`, the peak of an assignment is

    max over ops t of  sum of bytes(v) over v with start(v) <= t <= end(v)

Lives depend on the program alone, bytes on the assignment alone. Arguments, and arrays that the step closes over, live throughout. A
donated argument lends its memory to the state that it becomes. A loop keeps what it reads and what it stacks up as long as it runs, and
carries its state in place. An element-wise op writes over an operand that nothing reads later. Ops run in the order of
`machine.xla.schedule`; a time is the place of an op in the traced step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.cost.memory.loops import Loops, NarrowLife, ValueLife, copied_for_loops, hoisted, narrowed
from spmdctx.cost.memory.materialized import given_values, materialize_operands, materialize_written, materialized_values, settled_values
from spmdctx.ir.analysis.incidence import ends
from spmdctx.ir.analysis.kinds import op_kinds, value_kinds
from spmdctx.ir.arrays import IntArray
from spmdctx.ir.graph import LITERAL, Graph, Op, item_bytes
from spmdctx.ir.primitives import CARRYING, ENTERING, LEAVING
from spmdctx.ir.rule import FactorKind
from spmdctx.machine.topology import Compiler
from spmdctx.machine.xla.kept.joined_chains import joined_chains
from spmdctx.machine.xla.kept.narrow_stacks import given_back
from spmdctx.machine.xla.late_products import GradientProduct, gradient_products
from spmdctx.machine.xla.memory.images_on_chip import IMAGES_SHARE
from spmdctx.machine.xla.memory.late_branches import late_branches
from spmdctx.machine.xla.memory.late_gradients import made_in_turn, stacked_last, waits_in_regions, waits_outside
from spmdctx.machine.xla.memory.library_results import handed_out
from spmdctx.machine.xla.memory.loop_copies import loop_reads
from spmdctx.machine.xla.memory.on_chip import NO_CHIP, OnChip, is_short
from spmdctx.machine.xla.memory.row_fusions import read_with_their_rows
from spmdctx.machine.xla.memory.siblings import sibling_runs
from spmdctx.machine.xla.narrowing import narrow_values
from spmdctx.machine.xla.schedule import first_runs, iteration_ends, needed_products, order

_IN_PLACE = ("scatter", "dynamic_update_slice")


class Copy(NamedTuple):
    """The bytes that a resharded copy of a value takes from the op `start` to the op `end`, both included."""

    start: int
    end: int
    bytes: int


class StepMemory(NamedTuple):
    """Everything known of a step's memory before its shardings are known.

    Attributes:
        lives: the lives of values in memory.
        materialized: for each value, whether it exists in memory; a last 0 stands for literals.
        settled: for each value, whether it or its transpose does.
        narrow: for each value, whether it is kept in the type of matrix operands if the compiler narrows these.
        runs: when each op runs.
        times: the same, but for a fused op when the op runs that it is fused into, the last one if there are several.
        firsts: the same with the first of several.
        iteration_ends: for each op, where the iteration of its loop ends.
        products: the matrix products that others need.
        gradients: the products that may run last; none on one device.
        reads: from when to when inputs are read.
        in_carries: the values in the memory of a loop's carry, which they replace.
        made: the first of `lives` that an op makes in memory of its own, and the first after these.
        stacks: the narrow copies that are made for loops if the compiler narrows the operands of products.
    """

    lives: tuple[ValueLife, ...]
    materialized: bytearray
    settled: bytearray
    narrow: bytearray
    runs: tuple[int, ...]
    times: tuple[int, ...]
    firsts: tuple[int, ...]
    iteration_ends: tuple[int, ...]
    products: tuple[int, ...]
    gradients: tuple[GradientProduct, ...]
    reads: tuple[ValueLife, ...]
    in_carries: tuple[ValueLife, ...]
    made: tuple[int, int]
    stacks: tuple[NarrowLife, ...]


class Peak(NamedTuple):
    """The op at which most bytes are alive, and their number."""

    time: int
    bytes: int


def lives(graph: Graph, scopes: Sequence[int], donated: frozenset[int] = frozenset()) -> tuple[ValueLife, ...]:
    """Returns the lives of all values that exist in memory.

    Args:
        graph: the step.
        scopes: per op the computation that it belongs to (`Program.scopes`).
        donated: inputs whose memory the step may reuse.
    """
    return step_memory(graph, scopes, donated).lives


def compiled_memory(graph: Graph, scopes: Sequence[int], donated: frozenset[int], compiler: Compiler, is_split: bool = True) -> StepMemory:
    """Returns what `step_memory` does for a compiler; searches and bills ask here, so that neither counts what the other does not."""
    return step_memory(
        *(graph, scopes, donated),
        is_split=is_split,
        fuses_into_products=compiler.fuses_into_products,
        delays_gradients=compiler.delays_gradients,
        fuses_rows=compiler.fuses_rows,
    )


def step_memory(
    graph: Graph,
    scopes: Sequence[int],
    donated: frozenset[int] = frozenset(),
    *,
    is_split: bool = True,
    fuses_into_products: bool = True,
    delays_gradients: bool = False,
    fuses_rows: bool = False,
) -> StepMemory:
    """Returns everything known of a step's memory before its shardings are.

    Args:
        graph: the step.
        scopes: per op the computation that it belongs to (`Program.scopes`).
        donated: inputs whose memory the step may reuse.
        is_split: whether there is more than one device.
        fuses_into_products: `Compiler.fuses_into_products`.
        delays_gradients: `Compiler.delays_gradients`.
        fuses_rows: `Compiler.fuses_rows`.
    """
    key = (step_memory, tuple(scopes), is_split, fuses_into_products, delays_gradients, fuses_rows)
    known: StepMemory | None = graph.facts.get(key)
    if known is None:
        waits = (waits_in_regions(graph, scopes) or waits_outside(graph, scopes)) if delays_gradients and is_split else {}
        late = {**sibling_runs(graph), **(late_branches(graph) if is_split else {})} if delays_gradients else {}
        runs = order(graph, is_split, waits, late)
        known = graph.facts[key] = _Liveness(graph, scopes, runs, is_split, fuses_into_products).find(
            fuses_rows=fuses_rows, copies_for_loops=delays_gradients
        )
    lent: StepMemory | None = graph.facts.get((*key, donated))
    if lent is None:
        lent = graph.facts[(*key, donated)] = _lent(graph, known, donated)
    return lent


def _lent(graph: Graph, memory: StepMemory, donated: frozenset[int]) -> StepMemory:
    """Returns the memory of a step whose donated inputs lend theirs to their next values, where these are of their kind."""
    values = graph.values
    reused = {after for value, after in graph.ties if value in donated and values[after][1:3] == values[value][1:3]}
    first, end = memory.made
    made = [life for life in memory.lives[first:end] if life.value not in reused]
    apart = given_back(graph) - donated
    return memory._replace(
        lives=(*memory.lives[:first], *made, *memory.lives[end:]),
        in_carries=tuple([life for life in memory.in_carries if life.value not in reused]),
        made=(first, first + len(made)),
        stacks=tuple([life for life in memory.stacks if life.value not in apart]),
    )


def profile(
    found: Sequence[ValueLife],
    sizes: Sequence[int],
    num_ops: int,
    copies: Sequence[Copy] = (),
    chip: OnChip = NO_CHIP,
    images: tuple[Container[int], OnChip] | None = None,
) -> IntArray:
    """Returns the bytes alive at each op.

    Args:
        found: the lives.
        sizes: one device's bytes of each value of the graph.
        num_ops: number of ops of the graph.
        copies: the copies that live beside the values.
        chip: the part of the chip's memory that holds small and short-lived values.
        images: the values that are images, and what they and all others have of that memory together.
    """
    table = np.array([(start, end, sizes[value]) for value, start, end in found] + [tuple(copy) for copy in copies], dtype=np.int64)
    if not table.size:
        return np.zeros(max(num_ops, 1), dtype=np.int64)
    alive = _alive(table, num_ops)
    if chip.total_bytes:
        short = is_short(table[:, 0], table[:, 1], num_ops)
        fits = short & (table[:, 2] <= chip.largest_bytes)
        held = np.minimum(_alive(table[fits], num_ops), chip.total_bytes)
        if images is not None:
            own, together = images
            is_own = np.array([value in own for value, _, _ in found] + [False] * len(copies))
            inside = is_own & (table[:, 0] > 0) & (table[:, 1] < num_ops - 1) & (table[:, 2] <= together.largest_bytes)
            own_bytes = (IMAGES_SHARE * _alive(table[inside], num_ops)).astype(np.int64)
            every = own_bytes + np.minimum(_alive(table[fits & ~is_own], num_ops), chip.total_bytes)
            held = np.maximum(held, np.minimum(every, together.total_bytes))
        alive -= held
    return alive


def _alive(table: IntArray, num_ops: int) -> IntArray:
    """Returns the sum, at each op, of rows of start, end and bytes."""
    change = np.zeros(num_ops + 2, dtype=np.int64)
    np.add.at(change, table[:, 0], table[:, 2])
    np.subtract.at(change, table[:, 1] + 1, table[:, 2])
    return np.cumsum(change)[: max(num_ops, 1)]


def peak(found: Sequence[ValueLife], sizes: Sequence[int], num_ops: int, copies: Sequence[Copy] = ()) -> Peak:
    """Returns the largest entry of `profile`, the first if there are several."""
    alive = profile(found, sizes, num_ops, copies)
    time = int(alive.argmax())
    return Peak(time, int(alive[time]))


class _Liveness:
    def __init__(self, graph: Graph, scopes: Sequence[int], runs: tuple[int, ...], is_split: bool, fuses_into_products: bool) -> None:
        self.graph, self.scopes, self.is_split = graph, scopes, is_split
        self.given = given_values(graph)
        self.materialized = materialized_values(graph, self.given)
        if fuses_into_products:
            for value, joint in joined_chains(graph, self.materialized).items():
                self.materialized[value], self.materialized[joint] = 0, 1
        else:
            materialize_operands(graph, self.materialized)
        self.loops = Loops(graph, scopes)
        self.end = [-1] * (len(graph.values) + 1)
        self.start: dict[int, int] = {}
        self.carried = dict(graph.ties)
        self.replacing: set[int] = set()
        self.inputs = frozenset(self.given)
        self.runs = runs
        self.times = list(self.runs)

    def find(self, *, fuses_rows: bool, copies_for_loops: bool) -> StepMemory:
        graph = self.graph
        if copies_for_loops:
            materialize_written(graph, self.materialized)
            for value, time in stacked_last(graph).items():
                self.end[value] = time
        apart = read_with_their_rows(graph, self.materialized) if fuses_rows else {}
        kept = handed_out(graph) if fuses_rows else frozenset()
        self._find_ends()
        last = max(len(graph.ops) - 1, 0)
        for value in graph.outputs:
            self.end[value] = last
        firsts = first_runs(graph, self.materialized, self.runs)
        reads = self._reads(firsts)
        self._write_in_place(apart, kept)
        found = [ValueLife(value, 0, last) for value in self.given]
        in_carries: list[ValueLife] = []
        makers, made = ends(graph).results
        kept = np.frombuffer(self.materialized, dtype=np.uint8)[made] == 1
        for op, value in zip(makers[kept].tolist(), made[kept].tolist(), strict=True):
            start = self.start.get(value, self.runs[op])
            (in_carries if value in self.replacing else found).append(ValueLife(value, start, max(self.end[value], start)))
        made_lives = len(self.given), len(found)
        found += hoisted(graph, self.loops, self.carried, self.materialized)
        if copies_for_loops:
            copied = loop_reads(graph, self.materialized, self.carried, is_split=self.is_split)
            found += copied_for_loops(copied, self.loops, self.runs)
        loop_ends = iteration_ends(graph, self.scopes)
        in_turn = made_in_turn(graph, self.scopes) if copies_for_loops else frozenset[int]()
        return StepMemory(
            lives=tuple(found),
            materialized=self.materialized,
            settled=settled_values(graph, self.materialized),
            narrow=narrow_values(graph, self.materialized),
            runs=self.runs,
            times=tuple(self.times),
            firsts=firsts,
            iteration_ends=loop_ends,
            products=needed_products(graph),
            gradients=gradient_products(graph, self.materialized, loop_ends, in_turn) if self.is_split else (),
            reads=reads,
            in_carries=tuple(in_carries),
            made=made_lives,
            stacks=narrowed(graph, self.loops, self.carried),
        )

    def _reads(self, firsts: Sequence[int]) -> tuple[ValueLife, ...]:
        readers = self.graph.readers
        read = [value for value in self.graph.inputs if readers[value]]
        return tuple([ValueLife(value, min(firsts[op.id] for op in readers[value]), self.end[value]) for value in read])

    def _find_ends(self) -> None:
        """Finds the last op that reads each value; a chain reads its operands when its last reader runs."""
        end, materialized, runs, times = self.end, self.materialized, self.runs, self.times
        for index, name, operands, results, _, _, _, _, _, _ in reversed(self.graph.ops):
            if name in ENTERING:
                self._enter(self.graph.ops[index])
                continue
            if name in LEAVING:
                self._leave(self.graph.ops[index])
                continue
            time = runs[index]
            for value in results:
                if materialized[value]:
                    time = runs[index]
                    break
                if end[value] > time:
                    time = times[index] = end[value]
            for value in operands:
                if end[value] < time:
                    end[value] = time

    def _enter(self, op: Op) -> None:
        """Ends lives at a loop's entry: the loop keeps what it reads to its end, and carries state in the memory of its start value."""
        value, result = op.operands[0], op.results[0]
        after = self.carried.get(result)
        if after is not None:
            self._replace(op, result, after)
        time = max(self.loops.last[op.id], self.end[result])
        if after is not None:
            time = max(time, self.end[after])
        self.materialized[result] = 0
        if after is not None and (value == LITERAL or value in self.inputs or not self.materialized[value]):
            self.materialized[result] = 1
            self.end[result] = time
            time = op.id
        if self.end[value] < time:
            self.end[value] = time

    def _replace(self, op: Op, carry: int, after: int) -> None:
        """Puts the next value of a carry into its memory if nothing else reads the carry any more.

        The element-wise op that makes the next value may still read the carry.
        """
        graph = self.graph
        producer = graph.producers.get(after)
        if producer is None or graph.ops[producer].primitive not in CARRYING:
            return
        following = graph.ops[producer].operands[0]
        maker = graph.producers.get(following, -1) if following != LITERAL else -1
        if maker <= op.id or not self.materialized[following]:
            return
        made = self.runs[maker]
        if self.end[carry] < made or (self.end[carry] == made and _writes_in_place(graph.ops[maker])):
            self.replacing.add(following)

    def _leave(self, op: Op) -> None:
        """Ends lives at a loop's exit: a carry is copied at the end of each iteration, a slice is written into its stack at once."""
        value, result = op.operands[0], op.results[0]
        if op.primitive in CARRYING:
            self.materialized[result] = 0
        else:
            self.start[result] = self.loops.first[op.id]
        for operand in op.operands[1:]:
            self.end[operand] = max(self.end[operand], op.id)
        if op.primitive in CARRYING and value != LITERAL:
            self.end[value] = max(self.end[value], self.loops.last[op.id])

    def _write_in_place(self, apart: Mapping[int, frozenset[int]], kept: Container[int]) -> None:
        """Ends the life of an operand one op earlier where a result of its kind takes its memory.

        That is not so where the op writes the result `apart`, and of values that are `kept` to the last op that reads them.
        """
        materialized, end, runs = self.materialized, self.end, self.runs
        kinds = self._kinds()
        # For each value, the value in memory whose place a result of the same kind would take.
        roots = list(range(len(kinds)))
        done = -1
        for index, operand, result in self._of_one_kind(kinds):
            root = roots[operand]
            if index == done or not materialized[root] or root in kept or root in apart.get(index, ()):
                continue
            if not materialized[result]:
                roots[result], done = root, index
            elif end[root] == runs[index]:
                end[root], done = end[root] - 1, index

    def _of_one_kind(self, kinds: IntArray) -> Iterable[tuple[int, int, int]]:
        """Gives the ops that can write over what they read, each with an operand and the result that is of the operand's kind."""
        every, simple = ends(self.graph), op_kinds(self.graph).flags(_writes_in_place)
        results = every.first_results
        kept = ~every.is_result & simple[every.ops] & (kinds[every.values] == kinds[results[every.ops]])
        ops = every.ops[kept]
        return zip(ops.tolist(), every.values[kept].tolist(), results[ops].tolist(), strict=True)

    def _kinds(self) -> IntArray:
        """Returns equal numbers for values of one shape and size; those of inputs and of literals (the last) match no other value."""
        numbers, firsts = value_kinds(self.graph)
        count = dict[tuple[tuple[int, ...], int], int]()
        sizes = [count.setdefault((value.shape, item_bytes(value.dtype)), len(count)) for value in firsts]
        kinds = np.append(np.array(sizes, dtype=np.int64)[numbers], -2)
        kinds[self.given] = -1
        return kinds


def _writes_in_place(op: Op) -> bool:
    if len(op.results) != 1:
        return False
    return op.primitive.startswith(_IN_PLACE) or all(kind is FactorKind.PASS_THROUGH for kind in op.rule.kinds)
