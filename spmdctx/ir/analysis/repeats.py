"""How often what an op reads and makes exists in a step: the slices of a scanned array exist once per turn of the loop.

The boundary of a loop is executed once, outside: but what `scan.enter` makes of a stacked array, and what `scan.exit` stacks up,
is one slice per turn, and so is every reshard of it.
"""

from __future__ import annotations

from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import Boundary


def read_repeats(graph: Graph, op: Op) -> int:
    """How often an op's operands are taken."""
    return op.repeats * _iterations(graph, op.results[0], op.operands[0]) if op.boundary is Boundary.EXIT else op.repeats


def made_repeats(graph: Graph, op: Op) -> int:
    """How often an op's results are made."""
    return op.repeats * _iterations(graph, op.operands[0], op.results[0]) if op.boundary is Boundary.ENTER else op.repeats


def _iterations(graph: Graph, outer: int, inner: int) -> int:
    """The slices of a stacked array; 1 for what is carried, or the same in every turn."""
    if outer == LITERAL or inner == LITERAL:
        return 1
    stacked, each = graph.values[outer].shape, graph.values[inner].shape
    return stacked[0] if len(stacked) == len(each) + 1 else 1
