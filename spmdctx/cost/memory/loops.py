"""The bounds of a step's loops, and the lives of what is copied for them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op, item_bytes
from spmdctx.ir.primitives import ENTERING, LEAVING
from spmdctx.machine.xla.memory.loop_copies import LoopRead


class ValueLife(NamedTuple):
    """A value that is in memory from the op `start` to the op `end`, both included."""

    value: int
    start: int
    end: int


class Loops:
    """The bounds of loops: `last[i]` of an op that enters one, `first[i]` of one that leaves one, else the op itself."""

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


def hoisted(graph: Graph, loops: Loops, carried: Container[int], materialized: bytearray, *, takes_slices: bool = False) -> list[ValueLife]:
    """Returns the lives of narrow copies of values that loops do not change: XLA makes them once, before the first iteration.

    If it `takes_slices`, also those of arguments of which an iteration reads a slice.
    """
    values, found = graph.values, _narrow_stacks(graph, loops, carried, materialized) if takes_slices else []
    for op in ops_of(graph, ENTERING):
        if op.results[0] in carried or op.operands[0] == LITERAL:
            continue
        before, inside, end = values[op.operands[0]], op.results[0], loops.last[op.id]
        if end == op.id or before.shape != values[inside].shape:
            continue
        found += [ValueLife(value, op.id, end) for value in _narrow_copies(graph, inside, materialized)[:1]]
    return found


def _narrow_copies(graph: Graph, inside: int, materialized: bytearray) -> list[int]:
    """Returns what a loop makes of a value that enters it by giving it a narrower type, where that is fused into what reads it."""
    size = item_bytes(graph.values[inside].dtype)
    made = [reader.results[0] for reader in graph.readers[inside] if reader.primitive == "convert_element_type"]
    return [value for value in made if not materialized[value] and item_bytes(graph.values[value].dtype) < size]


def _narrow_stacks(graph: Graph, loops: Loops, carried: Container[int], materialized: bytearray) -> list[ValueLife]:
    """Returns the lives of narrow copies of arguments of which loops read a slice in each iteration: one life for each slice.

    XLA on TPU makes them all before the first loop that reads the argument, and keeps them to the end of the last one
    (`machine.xla.memory.loop_copies`).
    """
    values, arguments, found = graph.values, frozenset(graph.inputs), dict[int, ValueLife]()
    for op in ops_of(graph, ENTERING):
        inside, (stack, start, end) = op.results[0], _outermost(graph, op, loops, carried)
        if inside in carried or stack not in arguments or values[stack].shape[1:] != values[inside].shape:
            continue
        for value in _narrow_copies(graph, inside, materialized)[:1]:
            known = found.get(stack, ValueLife(value, start, end))
            found[stack] = ValueLife(known.value, min(start, known.start), max(end, known.end))
    return [life for stack, life in found.items() for _ in range(values[stack].shape[0])]


def _outermost(graph: Graph, op: Op, loops: Loops, carried: Container[int]) -> tuple[int, int, int]:
    """Returns the value that enters the outermost loop around a loop that only hands it on, and the first and last op of that loop."""
    value, start, end = op.operands[0], op.id, loops.last[op.id]
    while value in graph.producers and (outer := graph.ops[graph.producers[value]]).primitive in ENTERING:
        before = outer.operands[0]
        if value in carried or before == LITERAL or graph.values[before].shape != graph.values[value].shape:
            break
        value, start, end = before, outer.id, loops.last[outer.id]
    return value, start, end


def copied_for_loops(reads: Iterable[LoopRead], loops: Loops, runs: Sequence[int]) -> list[ValueLife]:
    """Returns the lives of copies of what loops read: of whole values before the first iteration, and of slices for products."""
    found = []
    for read in reads:
        if read.is_copied:
            found.append(ValueLife(read.value, read.entering, loops.last[read.entering]))
        if read.is_sliced and read.products:
            times = [runs[product] for product in read.products]
            found.append(ValueLife(read.slice, min(times), max(times)))
    return found
