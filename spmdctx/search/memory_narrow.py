"""Which float32 values are kept in the matrix unit's own precision (XLA on TPU, seen in compiled programs of libtpu 0.0.42).

A product whose result only other products read, be it behind a chain of element-wise ops that leads to nowhere else, is written in
the type in which they take it.
"""

from __future__ import annotations

from spmdctx.cost.topology import Topology
from spmdctx.ir import LITERAL, Graph, Value, item_bytes
from spmdctx.rules.elementwise import BINARY, MANY, UNARY
from spmdctx.search.kinds import of_primitives
from spmdctx.search.narrowing import NARROW_BYTES, narrow_readers
from spmdctx.search.space import MATRIX_PRODUCTS

_ELEMENTWISE = frozenset({*UNARY, *BINARY, *MANY})
_LONGEST = 60
"""Values of a chain that are looked at."""


def narrow_values(graph: Graph, held: bytearray) -> bytearray:
    """Per value 1 where it is kept narrow; `held` says which exist in memory."""
    found = bytearray(len(graph.values) + 1)
    if not any(value.dtype == "float32" and held[value.id] for value in graph.values):
        return found
    chains = _Chains(graph, held)
    made = bytearray(len(graph.values) + 1)
    products = of_primitives(graph, MATRIX_PRODUCTS).tolist()
    for index, _, operands, results, _, _, _, _, _, _ in graph.ops:
        of_product = products[index]
        for value in operands:
            if made[value] and not held[value]:
                of_product = True
        if of_product:
            for value in results:
                made[value] = 1
                found[value] = held[value] and graph.values[value].dtype == "float32" and chains.lead_to_products(value)
    return found


def kept_share(value: Value, narrow: bytearray, topology: Topology) -> float:
    """The part of its own bytes that a value takes in memory; `narrow` says which are kept narrow where the compiler does so."""
    return NARROW_BYTES / item_bytes(value.dtype) if narrow[value.id] and topology.narrows_matrix_operands else 1.0


class _Chains:
    """Where values go through element-wise ops that do not exist in memory."""

    def __init__(self, graph: Graph, held: bytearray) -> None:
        self._held, self._narrow = held, narrow_readers(graph)
        self._kept = frozenset((*graph.inputs, *graph.outputs))
        self._readers = graph.readers

    def lead_to_products(self, value: int) -> bool:
        """Whether products alone read the value, or the one value that all chains from it end in."""
        if value in self._kept:
            return False
        seen, left, ends = {value}, [value], set()
        while left:
            now = left.pop()
            for op in self._readers[now]:
                result = op.results[0] if op.results else LITERAL
                if op.primitive not in _ELEMENTWISE or self._held[result] or result in self._kept:
                    ends.add(now)
                elif result not in seen:
                    seen.add(result)
                    left.append(result)
            if len(seen) > _LONGEST:
                return False
        return len(ends) == 1 and self._is_for_products(ends.pop())

    def _is_for_products(self, value: int) -> bool:
        return bool(self._readers[value]) and all(self._narrow[op.id] for op in self._readers[value])
