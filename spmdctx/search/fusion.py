"""Which values of a step exist in memory, and which the compiler only computes on the way into other ops.

XLA fuses chains of element-wise ops into the matrix products and reductions that read them, computing them again for each
reader, and into the one that makes their operand. What is left in memory are arguments, results, what is computed by an op
that is no such chain (with the chain behind it, where that is its only reader), and what such an op must find in memory.
"""

from __future__ import annotations

from spmdctx.ir import LITERAL, Graph, Op
from spmdctx.rules.elementwise import BINARY, MANY, UNARY

ALIASES = frozenset({"spmdctx_shard", "sharding_constraint", "name", "scan.enter", "scan.next", "while.enter", "while.next"})
"""Ops whose result is their first operand under another name; a `scan.enter` that slices is none."""

_CHAINED = frozenset(
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

_READS_CHAINS = ("dot_general", "ragged_dot_general", "conv_general_dilated", "reduce", "arg", "scan.exit", "dynamic_update_slice")
"""Beginnings of the names of ops that are not fused with each other, but take chains as operands."""


def materialised(graph: Graph) -> bytearray:
    """Per value 1 where it exists in memory, 0 where it is only computed on the way; a last 0 stands for literals."""
    readers = _Readers(graph)
    held = bytearray(len(graph.values) + 1)
    for value in (*graph.inputs, *graph.outputs):
        if value != LITERAL:
            held[value] = 1
    ahead = bytearray(len(graph.values) + 1)
    for op in graph.ops:
        made = op.primitive not in _CHAINED
        for value in op.operands:
            if ahead[value]:
                made = True
        for value in op.results:
            if made and not readers.needed[value] and not held[value] and readers.passes_on(graph, value):
                ahead[value] = 1
            elif made or readers.needed[value]:
                held[value] = 1
    return held


class _Readers:
    """How often each value is read, by which op first, and whether an op needs it in memory."""

    def __init__(self, graph: Graph) -> None:
        size = len(graph.values) + 1  # the last one stands for literals
        self.count, self.first, self.needed = [0] * size, [-1] * size, bytearray(size)
        reads_chains: dict[str, bool] = {}
        for op in graph.ops:
            fused = reads_chains.get(op.primitive)
            if fused is None:
                fused = reads_chains[op.primitive] = op.primitive in _CHAINED or op.primitive.startswith(_READS_CHAINS)
            for value in op.operands:
                if self.first[value] != op.id:
                    self.count[value] += 1
                    self.first[value] = op.id
                if not fused:
                    self.needed[value] = 1

    def passes_on(self, graph: Graph, value: int) -> bool:
        """Whether the one reader of a value is a chained op on as many elements, fused into the op that makes the value."""
        if self.count[value] != 1:
            return False
        reader: Op = graph.ops[self.first[value]]
        if reader.primitive not in _CHAINED or "." in reader.primitive:
            return False
        return _elements(graph, reader.results[0]) == _elements(graph, value)


def _elements(graph: Graph, value: int) -> int:
    count = 1
    for size in graph.values[value].shape:
        count *= size
    return count
