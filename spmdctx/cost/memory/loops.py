"""The bounds of a step's loops, and the lives of what is copied for them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.graph import LITERAL, Graph, item_bytes
from spmdctx.ir.primitives import ENTERING, LEAVING
from spmdctx.machine.xla.kept.narrow_stacks import narrow_stacks
from spmdctx.machine.xla.memory.loop_copies import LoopRead


class ValueLife(NamedTuple):
    """A value that is in memory from the op `start` to the op `end`, both included."""

    value: int
    start: int
    end: int


class NarrowLife(NamedTuple):
    """The life of a narrow copy of a value, which has a `share` of the bytes that a device stores of it."""

    value: int
    start: int
    end: int
    share: float


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


def hoisted(graph: Graph, loops: Loops, carried: Container[int], materialized: bytearray) -> list[ValueLife]:
    """Returns the lives of narrow copies of values that loops do not change: XLA makes them once, before the first iteration."""
    values, found = graph.values, []
    for op in ops_of(graph, ENTERING):
        if op.results[0] in carried or op.operands[0] == LITERAL:
            continue
        before, inside, end = values[op.operands[0]], op.results[0], loops.last[op.id]
        if end == op.id or before.shape != values[inside].shape:
            continue
        size = item_bytes(before.dtype)
        made = [reader.results[0] for reader in graph.readers[inside] if reader.primitive == "convert_element_type"]
        narrow = [value for value in made if not materialized[value] and item_bytes(values[value].dtype) < size]
        found += [ValueLife(value, op.id, end) for value in narrow[:1]]
    return found


def narrowed(graph: Graph, loops: Loops, carried: Container[int]) -> tuple[NarrowLife, ...]:
    """Returns the lives of the narrow copies of stacks: from the first loop that reads one to the end of the last."""
    found: dict[int, NarrowLife] = {}
    for value, start, share in narrow_stacks(graph, carried):
        known, end = found.get(value), loops.last[start]
        if known is not None:
            start, end, share = min(start, known.start), max(end, known.end), max(share, known.share)
        found[value] = NarrowLife(value, start, end, share)
    return tuple(found.values())


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
