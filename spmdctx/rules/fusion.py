"""Which values of a step exist in memory, and which the compiler only computes on the way into other ops.

XLA fuses chains of element-wise ops into the matrix products and reductions that read them, computing them again for each
reader, and into the one that makes their operand. What is left in memory are arguments, results, what is computed by an op
that is no such chain (with the chain behind it, where that is its only reader), what such an op must find in memory, and what
several ops read that is made of many tensors of its size, or with a scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spmdctx.ir import LITERAL, Op, Value, item_bytes
from spmdctx.rules.elementwise import BINARY, MANY, UNARY

CHAINED = frozenset(
    {
        *UNARY,
        *BINARY,
        *MANY,
        *("broadcast_in_dim", "broadcast_to", "iota", "empty", "empty2", "reshape", "transpose", "squeeze", "expand_dims", "rev", "slice"),
        *("dynamic_slice", "pad", "concatenate", "split", "bitcast_convert_type", "spmdctx_shard", "sharding_constraint", "name"),
        *("scan.enter", "scan.next", "while.enter", "while.next", "device_put", "random_wrap", "random_unwrap"),
    }
)
"""Ops that the compiler fuses with others."""

_ELEMENTWISE = frozenset({*UNARY, *BINARY, *MANY})

_LOOP_READS = frozenset({"scan.enter", "while.enter"})
"""Ops that find in memory what is computed before them: the start of a loop."""

_SPREAD = frozenset({"broadcast_in_dim", "convert_element_type"})

_READS_CHAINS = ("dot_general", "ragged_dot_general", "conv_general_dilated", "reduce", "arg", "scan.exit", "dynamic_update_slice")
"""Beginnings of the names of ops that are not fused with each other, but take chains as operands."""

_MOST_SOURCES = 3
"""Tensors of a value's own size that it may be computed from, where several ops read it, before it is kept instead."""


def in_memory(values: Sequence[Value], ops: Sequence[Op], kept: Iterable[int]) -> bytearray:
    """Per value 1 where it exists in memory, 0 where it is only computed on the way; a last 0 stands for literals.

    Args:
        values: of the step.
        ops: of the step, an op's number being its place.
        kept: inputs and outputs.
    """
    held = bytearray(len(values) + 1)
    for value in kept:
        if value != LITERAL:
            held[value] = 1
    readers = _Readers(values, ops, held)
    ahead, compared = bytearray(len(values) + 1), bytearray(len(values) + 1)
    sources: list[frozenset[int]] = [frozenset()] * (len(values) + 1)
    for op in ops:
        made = not readers.is_chained(op)
        hands_on = not made or op.primitive.startswith(_READS_CHAINS)
        for value in op.operands:
            if ahead[value]:
                made = True
        for value in op.results:
            if made and hands_on and not readers.needed[value] and not held[value] and readers.passes_on(value):
                ahead[value] = 1
            elif made or readers.needed[value]:
                held[value] = 1
            elif not held[value]:
                found = _sources(op, value, held, sources, readers.elements)
                compared[value] = op.primitive == "scatter-add"
                for operand in op.operands:
                    compared[value] |= compared[operand]
                if readers.count[value] > 1 and (compared[value] or len(found) > _MOST_SOURCES):
                    held[value], compared[value] = 1, 0
                sources[value] = found
    return held


def _sources(op: Op, value: int, held: bytearray, sources: list[frozenset[int]], elements: list[int]) -> frozenset[int]:
    """The values in memory of at least the value's size that a chain computes it from."""
    found: frozenset[int] = frozenset()
    for operand in op.operands:
        if held[operand]:
            if elements[operand] >= elements[value]:
                found |= {operand}
        elif sources[operand]:
            found = sources[operand] | found if found else sources[operand]
        if len(found) > _MOST_SOURCES:
            break  # more change nothing
    return found


def read_before(values: Sequence[Value], ops: Sequence[Op]) -> list[tuple[int, ...]]:
    """Per op the operands that the fusion it ends up in has read, or made, for an earlier op.

    Element-wise ops that lead to nothing but results, through element-wise ops alone, are such fusions: an optimizer's update
    reads each tensor of a parameter once, and writes all of its results.
    """
    leads = bytearray(len(values) + 1)
    last = bytearray(len(ops))
    for op in reversed(ops):
        ends = op.primitive in _ELEMENTWISE
        for value in op.results:
            if leads[value]:
                ends = False
        if ends:
            last[op.id] = 1
            continue
        for value in op.operands:
            leads[value] = 1
    seen = bytearray(len(values) + 1)
    found: list[tuple[int, ...]] = []
    for op in ops:
        if not last[op.id]:
            found.append(())
            continue
        found.append(tuple([value for value in op.operands if seen[value]]))
        for value in (*op.operands, *op.results):
            seen[value] = 1
    return found


def fused_bits(op: Op, held: bytearray, read: Sequence[int] = ()) -> int:
    """`Op.fused` of an op; `read` are operands that are in its fusion already."""
    bits, bit = 0, 1
    for value in op.operands:
        if not held[value] or value in read:
            bits |= bit
        bit <<= 1
    for value in op.results:
        if not held[value]:
            bits |= bit
        bit <<= 1
    return bits


class _Readers:
    """How often each value is read, by which op first, and whether an op needs it in memory."""

    def __init__(self, values: Sequence[Value], ops: Sequence[Op], kept: bytearray) -> None:
        size = len(values) + 1  # the last one stands for literals
        self.count, self.first, self.needed = [0] * size, [-1] * size, bytearray(size)
        self.elements, self._ops = elements_of(values), ops
        self._bytes = [item_bytes(value.dtype) for value in values]
        # Numbers that depend on no input, spread out or not: they are made where they are read.
        simple = bytearray(count == 1 and not given for count, given in zip(self.elements, kept, strict=True))
        simple[LITERAL] = 1
        self._chained: dict[tuple[str, int], bool] = {}
        reads_chains: dict[str, bool] = {}
        for op in ops:
            fused = reads_chains.get(op.primitive)
            if fused is None:
                fused = reads_chains[op.primitive] = op.primitive in CHAINED or op.primitive.startswith(_READS_CHAINS)
            fused = fused or (op.primitive == "scatter-add" and self.is_chained(op))
            for value in op.operands:
                if self.first[value] != op.id:
                    self.count[value] += 1
                    self.first[value] = op.id
                if not fused or (op.primitive in _LOOP_READS and not simple[value]):
                    self.needed[value] = 1
            for value in op.results:
                simple[value] = (op.primitive in _SPREAD or self.elements[value] == 1) and all(simple[operand] for operand in op.operands)

    def is_chained(self, op: Op) -> bool:
        """Whether the compiler fuses an op with others; a scatter of one element per row becomes a comparison of indices."""
        if op.primitive != "scatter-add":
            return op.primitive in CHAINED
        key = (op.primitive, id(op.rule))
        known = self._chained.get(key)
        if known is None:
            rows = {dim for dim in op.rule.operands[2] if dim} & set(op.rule.results[0])
            shared = 1
            for dim in rows:
                for factor in dim:
                    shared *= op.rule.sizes[factor]
            left = len(op.rule.results[0]) - len(rows)
            known = self._chained[key] = left == 1 and self.elements[op.operands[2]] == shared
        return known

    def passes_on(self, value: int) -> bool:
        """Whether the one reader of a value is a chained op on as many elements, fused into the op that makes the value."""
        if self.count[value] != 1:
            return False
        reader = self._ops[self.first[value]]
        if not self.is_chained(reader) or "." in reader.primitive or self._widens_for_many(reader, value):
            return False
        return self.elements[reader.results[0]] == self.elements[value]

    def _widens_for_many(self, op: Op, value: int) -> bool:
        """Whether an op only makes its operand's numbers wider for several readers, which do so on their own."""
        made = op.results[0]
        return op.primitive == "convert_element_type" and self.count[made] > 1 and self._bytes[made] > self._bytes[value]


def elements_of(values: Sequence[Value]) -> list[int]:
    """The number of elements of each value; a last 0 stands for literals."""
    known: dict[tuple[int, ...], int] = {}
    counts = []
    for value in values:
        count = known.get(value.shape)
        if count is None:
            count = 1
            for size in value.shape:
                count *= size
            known[value.shape] = count
        counts.append(count)
    return [*counts, 0]
