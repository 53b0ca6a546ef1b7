"""Which ops read float32 values in the matrix unit's own precision, so that the values may be communicated in it (XLA on TPU)."""

from __future__ import annotations

from spmdctx.ir import Graph, item_bytes
from spmdctx.search.rewrites import BROUGHT_IN, LOOKED_UP
from spmdctx.search.space import MATRIX_PRODUCTS

NARROW_BYTES = item_bytes("bfloat16")


def narrow_readers(graph: Graph) -> bytearray:
    """Per op, 1 for matrix products, and for changes of layout, ways into loops and look-ups of which only such ops read the result."""
    known: bytearray | None = graph.facts.get(narrow_readers)
    if known is None:
        known = graph.facts[narrow_readers] = _narrow_readers(graph)
    return known


def _narrow_readers(graph: Graph) -> bytearray:
    wide = bytearray(len(graph.values) + 1)
    reads = [0] * (len(graph.values) + 1)
    for value in graph.outputs:
        wide[value] = 1
    for op in graph.ops:
        for value in op.operands:
            reads[value] += 1
    found = bytearray(len(graph.ops))
    for op in reversed(graph.ops):
        passes = op.primitive in BROUGHT_IN or (op.primitive == LOOKED_UP and reads[op.operands[0]] == 1)
        if op.primitive in MATRIX_PRODUCTS or (passes and not wide[op.results[0]]):
            found[op.id] = 1
        else:
            for value in op.operands:
                wide[value] = 1
    return found
