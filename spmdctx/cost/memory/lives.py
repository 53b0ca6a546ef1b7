"""Memory over a step: which values exist in memory from when to when, whatever their shardings, and how much that is.

With the values `v` that are materialised, each alive from op `start(v)` to op `end(v)`, the peak of an assignment is

    max over ops t of  sum of bytes(v) over v with start(v) <= t <= end(v)

Lives depend on the program alone, bytes on the assignment alone. Arguments and what the step closes over live throughout; a
donated argument lends its memory to the state it becomes. A loop keeps what it reads and what it stacks up as long as it runs,
and carries its state in place. An element-wise op writes over an operand that nothing reads later. Ops run in the order of
`machine.xla.schedule`; a time is the place of an op in the traced step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.ir.analysis.incidence import ends
from spmdctx.ir.analysis.kinds import inside, op_kinds, ops_of, value_kinds
from spmdctx.ir.arrays import IntArray
from spmdctx.ir.graph import LITERAL, Graph, Op, Role, item_bytes
from spmdctx.ir.primitives import ANNOTATIONS, CARRYING, ENTERING, HEAVY, LEAVING
from spmdctx.ir.rule import FactorKind
from spmdctx.machine.xla.late_products import GradientProduct, gradient_products
from spmdctx.machine.xla.memory.on_chip import OnChip, is_short
from spmdctx.machine.xla.narrowing import narrow_values
from spmdctx.machine.xla.schedule import first_runs, iteration_ends, needed_products, order

_IN_PLACE = ("scatter", "dynamic_update_slice")


class ValueLife(NamedTuple):
    """A value is in memory from the op `start` to the op `end`, both included."""

    value: int
    start: int
    end: int


class Copy(NamedTuple):
    """Bytes that a resharded copy of a value takes from the op `start` to the op `end`, both included."""

    start: int
    end: int
    bytes: int


class StepMemory(NamedTuple):
    """All that is known of a step's memory before its shardings are.

    `materialized` says per value whether it exists in memory (a last 0 stands for literals), `settled` whether it or its transpose does,
    `narrow` which of them are kept in the type of matrix operands where the compiler does so. `runs` says when each op runs; `times`
    too, but for a fused op when that runs which it is fused into, the last one where these are several, and `firsts` for the first
    one; `iteration_ends` where the iteration of an op's loop ends. `products` are the matrix products that others need, `gradients`
    those that may run last; none where nothing is moved.
    `reads` says from when to when inputs are read, `in_carries` which values are in the memory of a loop's carry that they replace.
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


class Peak(NamedTuple):
    """The op at which most bytes are alive, and how many those are."""

    time: int
    bytes: int


def lives(graph: Graph, scopes: Sequence[int], donated: frozenset[int] = frozenset()) -> tuple[ValueLife, ...]:
    """The lives of all values that exist in memory.

    Args:
        graph: the step.
        scopes: per op the computation that it belongs to (`Program.scopes`).
        donated: inputs whose memory the step may reuse.
    """
    return step_memory(graph, scopes, donated).lives


def step_memory(
    graph: Graph, scopes: Sequence[int], donated: frozenset[int] = frozenset(), *, waits: bool = True, fuses_into_products: bool = True
) -> StepMemory:
    """The same, with what else is known before the shardings are; `waits` says whether there is more than one device."""
    key = (step_memory, tuple(scopes), donated, waits, fuses_into_products)
    known: StepMemory | None = graph.facts.get(key)
    if known is None:
        known = graph.facts[key] = _Liveness(graph, scopes, donated, waits, fuses_into_products).find()
    return known


def profile(
    found: Sequence[ValueLife], sizes: Sequence[int], num_ops: int, copies: Sequence[Copy] = (), scratch_bytes: int = 0
) -> IntArray:
    """Bytes alive at each op.

    Args:
        found: the lives.
        sizes: one device's bytes of each value of the graph.
        num_ops: of the graph.
        copies: what lives beside the values.
        scratch_bytes: `Compiler.scratch_bytes`: as much of the small and short-lived is on the chip.
    """
    table = np.array([(start, end, sizes[value]) for value, start, end in found] + [tuple(copy) for copy in copies], dtype=np.int64)
    if not table.size:
        return np.zeros(max(num_ops, 1), dtype=np.int64)
    alive = _alive(table, num_ops)
    if scratch_bytes:
        chip = OnChip.of(scratch_bytes)
        fits = is_short(table[:, 0], table[:, 1], num_ops) & (table[:, 2] <= chip.largest_bytes)
        alive -= np.minimum(_alive(table[fits], num_ops), chip.total_bytes)
    return alive


def _alive(table: IntArray, num_ops: int) -> IntArray:
    """The sum of rows of start, end and bytes, at each op."""
    change = np.zeros(num_ops + 2, dtype=np.int64)
    np.add.at(change, table[:, 0], table[:, 2])
    np.subtract.at(change, table[:, 1] + 1, table[:, 2])
    return np.cumsum(change)[: max(num_ops, 1)]


def peak(found: Sequence[ValueLife], sizes: Sequence[int], num_ops: int, copies: Sequence[Copy] = ()) -> Peak:
    """The largest entry of `profile`, the first where there are several."""
    alive = profile(found, sizes, num_ops, copies)
    time = int(alive.argmax())
    return Peak(time, int(alive[time]))


class _Loops:
    """Where loops begin and end: `last[i]` of an op that enters one, `first[i]` of one that leaves one, else the op itself."""

    def __init__(self, graph: Graph, scopes: Sequence[int]) -> None:
        count = len(graph.ops)
        self.first, self.last = list(range(count)), list(range(count))
        open_loops: dict[int, list[int]] = {}
        entered: set[int] = set()
        if not ops_of(graph, LEAVING):
            return
        for op in reversed(graph.ops):
            scope = scopes[op.id]
            if op.primitive in LEAVING:
                if scope in entered or scope not in open_loops:
                    open_loops[scope] = []
                    entered.discard(scope)
                open_loops[scope].append(op.id)
            elif op.primitive in ENTERING and scope in open_loops:
                entered.add(scope)
                self.last[op.id] = open_loops[scope][0]
                for leaving in open_loops[scope]:
                    self.first[leaving] = op.id
            elif scope in open_loops:
                del open_loops[scope]
                entered.discard(scope)


class _Liveness:
    def __init__(self, graph: Graph, scopes: Sequence[int], donated: frozenset[int], waits: bool, fuses_into_products: bool) -> None:
        self.graph, self.donated, self.scopes, self.waits = graph, donated, scopes, waits
        self.given = _given(graph)
        self.materialized = _materialized(graph, self.given)
        if not fuses_into_products:
            _materialize_operands(graph, self.materialized)
        self.loops = _Loops(graph, scopes)
        self.end = [-1] * (len(graph.values) + 1)
        self.start: dict[int, int] = {}
        self.carried = dict(graph.ties)
        self.replacing: set[int] = set()
        self.inputs = frozenset(self.given)
        self.runs = order(graph, waits)
        self.times = list(self.runs)

    def find(self) -> StepMemory:
        graph = self.graph
        self._find_ends()
        last = max(len(graph.ops) - 1, 0)
        reused = {self.carried[value] for value in self.donated if self._becomes(value)}
        for value in graph.outputs:
            self.end[value] = last
        firsts = first_runs(graph, self.materialized, self.runs)
        reads = self._reads(firsts)
        self._write_in_place()
        found = [ValueLife(value, 0, last) for value in self.given]
        in_carries: list[ValueLife] = []
        makers, made = ends(graph).results
        kept = np.frombuffer(self.materialized, dtype=np.uint8)[made] == 1
        for op, value in zip(makers[kept].tolist(), made[kept].tolist(), strict=True):
            if value not in reused:
                start = self.start.get(value, self.runs[op])
                (in_carries if value in self.replacing else found).append(ValueLife(value, start, max(self.end[value], start)))
        found += self._hoisted()
        loop_ends = iteration_ends(graph, self.scopes)
        return StepMemory(
            lives=tuple(found),
            materialized=self.materialized,
            settled=_settled(graph, self.materialized),
            narrow=narrow_values(graph, self.materialized),
            runs=self.runs,
            times=tuple(self.times),
            firsts=firsts,
            iteration_ends=loop_ends,
            products=needed_products(graph),
            gradients=gradient_products(graph, self.materialized, loop_ends) if self.waits else (),
            reads=reads,
            in_carries=tuple(in_carries),
        )

    def _reads(self, firsts: Sequence[int]) -> tuple[ValueLife, ...]:
        readers = self.graph.readers
        read = [value for value in self.graph.inputs if readers[value]]
        return tuple([ValueLife(value, min(firsts[op.id] for op in readers[value]), self.end[value]) for value in read])

    def _hoisted(self) -> list[ValueLife]:
        """What loops narrow of values that stay the same: made once, before the first turn, and kept."""
        values, found = self.graph.values, []
        for op in ops_of(self.graph, ENTERING):
            if op.results[0] in self.carried or op.operands[0] == LITERAL:
                continue
            before, inside, end = values[op.operands[0]], op.results[0], self.loops.last[op.id]
            if end == op.id or before.shape != values[inside].shape:
                continue
            size = item_bytes(before.dtype)
            made = [reader.results[0] for reader in self.graph.readers[inside] if reader.primitive == "convert_element_type"]
            narrow = [value for value in made if not self.materialized[value] and item_bytes(values[value].dtype) < size]
            found += [ValueLife(value, op.id, end) for value in narrow[:1]]
        return found

    def _becomes(self, value: int) -> bool:
        """Whether a donated input has a next value of its kind to lend its memory to."""
        after = self.carried.get(value)
        return after is not None and self.graph.values[after][1:3] == self.graph.values[value][1:3]

    def _find_ends(self) -> None:
        """Last op by which each value is read; what a chain reads is read when its last reader runs."""
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
        """What a loop reads it keeps to its end; what it carries is in the memory of what it starts from."""
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
        """The next value of a carry takes its memory if nothing reads the carry any more, or only the element-wise op that makes it."""
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
        """A carry is copied at the end of each turn; a slice is written into its stack at once."""
        value, result = op.operands[0], op.results[0]
        if op.primitive in CARRYING:
            self.materialized[result] = 0
        else:
            self.start[result] = self.loops.first[op.id]
        for operand in op.operands[1:]:
            self.end[operand] = max(self.end[operand], op.id)
        if op.primitive in CARRYING and value != LITERAL:
            self.end[value] = max(self.end[value], self.loops.last[op.id])

    def _write_in_place(self) -> None:
        """Ends the life of an operand one op earlier where a result of its kind takes its memory."""
        materialized, end, runs = self.materialized, self.end, self.runs
        kinds = self._kinds()
        # The value whose memory a value of the same kind, itself not in memory, would take.
        roots = list(range(len(kinds)))
        done = -1
        for index, operand, result in self._of_one_kind(kinds):
            root = roots[operand]
            if index == done or not materialized[root]:
                continue
            if not materialized[result]:
                roots[result], done = root, index
            elif end[root] == runs[index]:
                end[root], done = end[root] - 1, index

    def _of_one_kind(self, kinds: IntArray) -> Iterable[tuple[int, int, int]]:
        """Of ops that can write over what they read, operands with the result that is of their kind."""
        every, simple = ends(self.graph), op_kinds(self.graph).flags(_writes_in_place)
        results = every.first_results
        kept = ~every.is_result & simple[every.ops] & (kinds[every.values] == kinds[results[every.ops]])
        ops = every.ops[kept]
        return zip(ops.tolist(), every.values[kept].tolist(), results[ops].tolist(), strict=True)

    def _kinds(self) -> IntArray:
        """Equal numbers for values of one shape and size; the last, for literals, and those of inputs are like no other."""
        numbers, firsts = value_kinds(self.graph)
        count = dict[tuple[tuple[int, ...], int], int]()
        sizes = [count.setdefault((value.shape, item_bytes(value.dtype)), len(count)) for value in firsts]
        kinds = np.append(np.array(sizes, dtype=np.int64)[numbers], -2)
        kinds[self.given] = -1
        return kinds


def _given(graph: Graph) -> list[int]:
    """Arguments, and the arrays that the step closes over, which are part of the program."""
    values, is_made = graph.values, np.zeros(len(graph.values), dtype=bool)
    is_made[ends(graph).results[1]] = True
    return [*graph.inputs, *(value for value in np.flatnonzero(~is_made).tolist() if values[value].role is Role.CONSTANT)]


def _materialized(graph: Graph, given: Sequence[int]) -> bytearray:
    """Per value whether it exists in memory; a last 0 stands for literals."""
    materialized, made = np.zeros(len(graph.values) + 1, dtype=np.uint8), ends(graph).results[1]
    materialized[given] = 1
    materialized[made] = ~inside(graph)[made]
    return bytearray(materialized)


def _materialize_operands(graph: Graph, materialized: bytearray) -> None:
    """Puts what matrix products read into memory; marks are but other names."""
    for op in ops_of(graph, HEAVY):
        for value in op.operands:
            while value != LITERAL and not materialized[value]:
                maker = graph.ops[graph.producers[value]]
                if maker.primitive not in ANNOTATIONS:
                    materialized[value] = 1
                else:
                    value = maker.operands[0]


def _settled(graph: Graph, materialized: bytearray) -> bytearray:
    """Per value whether it exists in memory, or is written there by the op that makes it, under a mark or transposed."""
    found = bytearray(materialized)
    for op in reversed(ops_of(graph, ("transpose", *ANNOTATIONS))):
        if found[op.results[0]]:
            value = op.operands[0]
            if value != LITERAL and len(graph.readers[value]) == 1:
                found[value] = 1
    return found


def _writes_in_place(op: Op) -> bool:
    if len(op.results) != 1:
        return False
    return op.primitive.startswith(_IN_PLACE) or all(kind is FactorKind.PASS_THROUGH for kind in op.rule.kinds)
