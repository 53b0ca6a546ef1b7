"""XLA on TPU fuses into a product all that is made of its result, and stores only what others read of it.

What XLA does: the gradient of an activation takes the product before it several times, and a tensor of the forward pass beside it. All of
    this is one fusion with the product: its result is never stored, and the one value that several others read takes the place of the
    tensor beside it. So one tensor of the hidden layer is in memory there, not two.
Seen in: libtpu 0.0.42, v5p: gradients of tanh (65536 rows) and of GELU by its tanh (32768 and 65536 rows) in bfloat16, recomputed; the
    fusion's `aliasing_operands` name the tensor. Stages of recomputed layers were planned at 1.16 to 1.33 of the compiled peaks without
    this (benchmarks/RESULTS.md). An exact GELU keeps two tensors, and its fusion names none.
Switch: `Compiler.fuses_into_products`
Priced by: cost.memory.lives
Written or prevented by: nothing
Checked by: tests/machine/xla/kept/test_joined_chains.py
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from spmdctx.ir.analysis.incidence import ends
from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.graph import LITERAL, Graph
from spmdctx.ir.primitives import BOUNDARY_OF, MATRIX_PRODUCTS
from spmdctx.machine.xla.fusion import CHAINED

_LONGEST = 64
"""The most ops that are followed behind a product.

Measured on: the gradient of a GELU has 11.
Checked by: tests/machine/xla/kept/test_joined_chains.py
"""


def joined_chains(graph: Graph, materialized: bytearray) -> dict[int, int]:
    """Returns for results of products that are never stored the value that is stored in their place.

    Args:
        graph: The step.
        materialized: A flag for each value: 1 if it exists in memory.
    """
    joints = _Joints(graph, materialized)
    found: dict[int, int] = {}
    for op in ops_of(graph, MATRIX_PRODUCTS):
        value = joints.stored(op.results[0])
        if value is not None and (joint := joints.of(value, op.id)) is not None:
            found[value] = joint
    return found


class _Joints:
    def __init__(self, graph: Graph, materialized: bytearray) -> None:
        self._graph, self._materialized = graph, materialized
        makers, made = ends(graph).results
        makers_of = np.full(len(graph.values) + 1, -1)
        makers_of[made] = makers
        self._makers: list[int] = makers_of.tolist()

    def stored(self, value: int) -> int | None:
        """Returns the value in memory that a product's result becomes, through the ops that alone read it."""
        for _ in range(_LONGEST):
            if self._materialized[value]:
                return value
            readers = self._graph.readers[value]
            if len(readers) != 1 or not self._is_chain(value, readers[0].id):
                return None
            value = readers[0].results[0]
        return None

    def of(self, value: int, product: int) -> int | None:
        """Returns the last value through which all goes that is made of `value`; None if there is no other."""
        left, met, joint = [(self._makers[value], value)], {value}, value
        for _ in range(_LONGEST):
            _, earliest = heappop(left)
            if not left:
                joint = earliest
            readers = self._graph.readers[earliest]
            if not readers or not all(self._is_chain(value, op.id) for op in readers):
                break
            if earliest != value and self._materialized[earliest]:
                break
            for op in readers:
                if op.results[0] not in met:
                    met.add(op.results[0])
                    heappush(left, (op.id, op.results[0]))
        else:
            return None
        is_last = not left and joint != value and not self._materialized[joint]
        # One product alone computes the chain from its operand.
        is_shared = len(self._graph.readers[joint]) > 1
        return joint if is_last and is_shared and self._are_there(met, product) else None

    def _is_chain(self, value: int, op: int) -> bool:
        """Returns whether an op is element-wise, on as many elements as `value` has."""
        one, values = self._graph.ops[op], self._graph.values
        if one.primitive not in CHAINED or one.primitive in BOUNDARY_OF or len(one.results) != 1:
            return False
        return values[one.results[0]].shape == values[value].shape

    def _are_there(self, met: set[int], product: int) -> bool:
        """Returns whether all that the chain reads beside the product's result is made before the product runs."""
        left = [other for value in met for other in self._graph.ops[self._makers[value]].operands if self._makers[value] != product]
        seen = {LITERAL, *met}
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            maker = self._makers[value]
            if self._materialized[value]:
                if maker > product:
                    return False
            elif maker >= 0:
                left += self._graph.ops[maker].operands
        return True
