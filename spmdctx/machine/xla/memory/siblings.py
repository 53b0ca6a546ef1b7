"""XLA on GPU makes element-wise values of one convolution's result in one kernel, when the last of them can be made.

What XLA does: element-wise ops that read one value, of which none needs another one's result, become one kernel with several results. It
    reads the value once, and runs when all of its operands are there. Where a convolution is computed again in the backward pass, its
    rectified result, which a gradient needs, and the cotangent that passes through the rectifier are written at once. So what both are
    made of is in memory with both.
Seen in: CUDA plugin 0.10.2 for H100: stages of recomputed convolutions on one device each hold five values of a layer's size, where their
    plans counted four (benchmarks/RESULTS.md). Kernels of matrix products make such values by themselves.
Switch: none: a property of compilers that follows from other switches
Priced by: machine.xla.schedule, for cost.memory.lives
Written or prevented by: nothing
Checked by: tests/machine/xla/test_siblings.py
"""

from __future__ import annotations

from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import MATRIX_PRODUCTS
from spmdctx.rules.elementwise import ELEMENTWISE


def sibling_runs(graph: Graph) -> dict[int, int]:
    """Returns when the first ones of element-wise ops run that read one convolution's result: with the last one that needs none of them."""
    found: dict[int, int] = {}
    for convolution in ops_of(graph, ("conv_general_dilated",)):
        own = _read_by_products(graph, convolution.results[0])
        for first in own[:-1]:
            last = max((op.id for op in own if op.id > first.id and not _needs(graph, op, first)), default=first.id)
            if last > first.id:
                found[first.id] = last
    return found


def _read_by_products(graph: Graph, value: int) -> list[Op]:
    """Returns the element-wise ops whose results are made of a value, by others or not, and read by products; in the order of the graph."""
    shape, found, seen = graph.values[value].shape, dict[int, Op](), {value}
    pending = [value]
    while pending:
        for op in graph.readers[pending.pop()]:
            for result in op.results if op.primitive in ELEMENTWISE else ():
                if graph.values[result].shape != shape or result in seen:
                    continue
                seen.add(result)
                if any(reader.primitive in MATRIX_PRODUCTS for reader in graph.readers[result]):
                    found[op.id] = op
                else:
                    pending.append(result)
    return [found[index] for index in sorted(found)]


def _needs(graph: Graph, op: Op, other: Op) -> bool:
    """Returns whether an op needs a result of another one, by others or not."""
    pending, seen = list(op.operands), set[int]()
    while pending:
        value = pending.pop()
        maker = graph.producers.get(value, -1) if value != LITERAL else -1
        if maker == other.id:
            return True
        if maker > other.id and maker not in seen:
            seen.add(maker)
            pending += graph.ops[maker].operands
    return False
