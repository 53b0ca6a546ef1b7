"""Which ops read values for matrix products: in the matrix unit's own precision, in which float32 values may then be communicated
(XLA on TPU), and such that they share what is gathered for them."""

from __future__ import annotations

import numpy as np

from spmdctx.ir import LITERAL, Graph, Op, item_bytes
from spmdctx.search.incidences import ends
from spmdctx.search.kinds import of_primitives, ops_of
from spmdctx.search.rewrites import BROUGHT_IN, LOOKED_UP, REARRANGED
from spmdctx.search.space import MATRIX_PRODUCTS

NARROW_BYTES = item_bytes("bfloat16")


def sharers(graph: Graph) -> bytearray:
    """Per op, 1 for matrix products, and for transposes and the like of which only such ops read the result.

    Those of one computation that read one value share the copies that are made of it.
    """
    known: bytearray | None = graph.facts.get(sharers)
    if known is None:
        known = graph.facts[sharers] = _sharers(graph)
    return known


def sharing_ops(graph: Graph) -> list[Op]:
    """The ops that are `sharers`."""
    return [graph.ops[index] for index in np.flatnonzero(np.frombuffer(sharers(graph), dtype=np.uint8)).tolist()]


def _sharers(graph: Graph) -> bytearray:
    found = bytearray(of_primitives(graph, MATRIX_PRODUCTS).tobytes())
    rearranging = of_primitives(graph, REARRANGED)
    if not rearranging.any():
        return found
    every = ends(graph)
    takes = ~every.is_result
    # What some other op reads, or the step returns.
    elsewhere = np.zeros(len(graph.values) + 1, dtype=np.uint8)
    elsewhere[list(graph.outputs)] = 1
    elsewhere[every.values[takes][~(np.frombuffer(found, dtype=np.uint8).astype(bool) | rearranging)[every.ops[takes]]]] = 1
    for index in np.flatnonzero(rearranging)[::-1].tolist():
        op = graph.ops[index]
        if elsewhere[op.results[0]]:
            elsewhere[op.operands[0]] = 1
        else:
            found[index] = 1
    return found


def narrow_readers(graph: Graph) -> bytearray:
    """Per op, 1 for matrix products, and for changes of layout, ways into loops and look-ups of which only such ops read the result."""
    known: bytearray | None = graph.facts.get(narrow_readers)
    if known is None:
        known = graph.facts[narrow_readers] = _narrow_readers(graph)
    return known


def _narrow_readers(graph: Graph) -> bytearray:
    every = ends(graph)
    takes = ~every.is_result
    ops, read = every.ops[takes], every.values[takes]
    products, passing = of_primitives(graph, MATRIX_PRODUCTS), of_primitives(graph, BROUGHT_IN | {LOOKED_UP})
    reads = np.bincount(read - LITERAL, minlength=len(graph.values) - LITERAL)
    for op in ops_of(graph, (LOOKED_UP,)):
        passing[op.id] = reads[op.operands[0] - LITERAL] == 1
    # Other ops take what they read as it is; those that pass it on do as their readers do.
    wide = np.zeros(len(graph.values) + 1, dtype=np.uint8)
    wide[list(graph.outputs)] = 1
    wide[read[~(products | passing)[ops]]] = 1
    found, is_wide = bytearray(products.tobytes()), bytearray(wide.tobytes())
    for index in np.flatnonzero(passing)[::-1].tolist():
        op = graph.ops[index]
        if not is_wide[op.results[0]]:
            found[index] = 1
        else:
            for value in op.operands:
                is_wide[value] = 1
    return found
