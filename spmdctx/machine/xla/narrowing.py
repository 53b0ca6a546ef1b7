"""XLA on TPU keeps and moves float32 values in the matrix unit's own precision where only products read them.

What XLA does: it communicates a float32 value as bfloat16 if only matrix products read it, be it behind a chain of element-wise ops that
    leads nowhere else. It writes a product, rows that are looked up, a padded value and what a loop stacks up as bfloat16 if only such
    readers take the result, or its parts, or what it is put together with. It reduces a sum over devices of that kind in float32 first,
    and both are in memory then.
Seen in: libtpu 0.0.42, v5e:2x4: without narrow results 50 of 70 peaks are within 15 % instead of 54, and without the float32 of their
    sums four MoEs are 13 to 28 % too small. v5e, v5p and v6e: graph networks and recurrent networks (benchmarks/RESULTS.md). Sharded
    float32 weights are gathered as bfloat16. libtpu 0.0.42.1, v5e and v5p: queries, keys and values of one product. GPU and CPU do
    neither.
Switch: `Compiler.narrows_matrix_operands`
Priced by: cost.price.price, cost.price.moves, cost.price.memory, cost.evaluate, cost.shared_reads, cost.bodies, cost.memory.lives,
    search.problem.memory.stored, search.problem.memory.copies, search.problem.network
Written or prevented by: lowering.rewrite.rewriter takes values through the shardings that products share.
Checked by: tests/machine/xla/test_narrowing.py, tests/machine/xla/test_partial_sums.py, tests/audit/test_collectives_tpu.py,
    benchmarks/fidelity_plans.py
"""

from __future__ import annotations

import numpy as np

from spmdctx.ir.analysis.chains import Walk, ends_below
from spmdctx.ir.analysis.incidence import ends
from spmdctx.ir.analysis.kinds import of_primitives, ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op, Value, item_bytes
from spmdctx.ir.primitives import BROUGHT_IN, LOOKED_UP, MATRIX_PRODUCTS, REARRANGED, SCAN_EXIT
from spmdctx.machine.topology import Topology
from spmdctx.rules.elementwise import ELEMENTWISE

_WRITTEN_NARROW = frozenset({LOOKED_UP, "pad", SCAN_EXIT})
"""Ops beside products whose results XLA writes in the precision of the products that alone read them."""


def narrow_values(graph: Graph, materialized: bytearray) -> bytearray:
    """Returns a flag for each value: 1 if XLA keeps it narrow. `materialized` says which values exist in memory."""
    found = bytearray(len(graph.values) + 1)
    if not any(value.dtype == "float32" and materialized[value.id] for value in graph.values):
        return found
    chains = _Chains(graph, materialized)
    products, brought = of_primitives(graph, MATRIX_PRODUCTS), of_primitives(graph, BROUGHT_IN).tolist()
    others = of_primitives(graph, _WRITTEN_NARROW)
    # A pad that finds its operand in memory stands by itself.
    for op in ops_of(graph, ("pad",)):
        others[op.id] = not materialized[op.operands[0]]
    every, may_take = ends(graph), products | others | np.array(brought, dtype=bool)
    may_take[every.ops[~every.is_result & (np.frombuffer(materialized, dtype=np.uint8)[every.values] == 0)]] = True
    # Values made of products on the way into other ops.
    passed, makes = bytearray(len(graph.values) + 1), products.tolist()
    for index in np.flatnonzero(may_take).tolist():
        op, of_product = graph.ops[index], makes[index] or others[index]
        for value in op.operands:
            if passed[value] or (found[value] and brought[index]):
                of_product = True
        if not of_product:
            continue
        for value in op.results:
            if not materialized[value]:
                passed[value] = 1
            else:
                found[value] = graph.values[value].dtype == "float32" and chains.lead_to_products(value)
    return found


def kept_share(value: Value, narrow: bytearray, topology: Topology) -> float:
    """Returns the part of its own bytes that a value takes in memory; `narrow` flags the values that such a compiler keeps narrow."""
    return NARROW_BYTES / item_bytes(value.dtype) if narrow[value.id] and topology.compiler.narrows_matrix_operands else 1.0


class _Chains:
    """The ways of values through element-wise ops whose results do not exist in memory."""

    def __init__(self, graph: Graph, materialized: bytearray) -> None:
        self._narrow, self._readers = narrow_readers(graph), graph.readers
        self._kept = frozenset((*graph.inputs, *graph.outputs))
        exists = np.frombuffer(materialized, dtype=np.uint8) == 1
        exists[list(self._kept)] = True
        self._graph = graph
        # A flag for each op: True if a chain goes on behind it.
        self._passes: list[bool] = (of_primitives(graph, ELEMENTWISE) & ~exists[ends(graph).first_results]).tolist()

    def lead_to_products(self, value: int) -> bool:
        """Returns whether products alone read the value, or the one value in which all chains from it end."""
        if value in self._kept:
            return False
        walk = Walk([value])
        last = {end for end, _ in ends_below(self._graph, walk, self._passes)}
        return not walk.is_cut and len(last) == 1 and self._is_for_products(last.pop())

    def _is_for_products(self, value: int) -> bool:
        return bool(self._readers[value]) and all(self._narrow[op.id] for op in self._readers[value])


NARROW_BYTES = item_bytes("bfloat16")


def sharers(graph: Graph) -> bytearray:
    """Returns a flag for each op: 1 for matrix products, and for transposes and the like whose result only such ops read.

    Flagged ops of one computation that read the same value share the copies that are made of it.
    """
    known: bytearray | None = graph.facts.get(sharers)
    if known is None:
        known = graph.facts[sharers] = _sharers(graph)
    return known


def sharing_ops(graph: Graph) -> list[Op]:
    """Returns the ops that `sharers` flags."""
    return [graph.ops[index] for index in np.flatnonzero(np.frombuffer(sharers(graph), dtype=np.uint8)).tolist()]


def _sharers(graph: Graph) -> bytearray:
    found = bytearray(of_primitives(graph, MATRIX_PRODUCTS).tobytes())
    rearranging = of_primitives(graph, REARRANGED)
    if not rearranging.any():
        return found
    every = ends(graph)
    takes = ~every.is_result
    # Values that some other op reads, or the step returns.
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
    """Returns a flag for each op: 1 for matrix products, and for other ops whose results only flagged ops read.

    These other ops are changes of layout, parts of tensors, tensors put together, entries of loops, and look-ups.
    """
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
    # Other ops read values in their own type; those that pass a value on do as their readers do.
    wide = np.zeros(len(graph.values) + 1, dtype=np.uint8)
    wide[list(graph.outputs)] = 1
    wide[read[~(products | passing)[ops]]] = 1
    found, is_wide = bytearray(products.tobytes()), bytearray(wide.tobytes())
    for index in np.flatnonzero(passing)[::-1].tolist():
        op = graph.ops[index]
        if not any(is_wide[result] for result in op.results):
            found[index] = 1
        else:
            for value in op.operands:
                is_wide[value] = 1
    return found
