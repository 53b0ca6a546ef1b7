"""Counts how often the operands and the results of an op exist in a step: slices of a scanned array exist once per iteration of the loop.

The boundary of a loop is executed once, outside. But `scan.enter` makes one slice of a stacked array in every iteration, and `scan.exit`
stacks one slice of every iteration. Reshards of these slices run once per iteration too.
"""

from __future__ import annotations

from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import Boundary


def read_repeats(graph: Graph, op: Op) -> int:
    """Returns how often an op takes its operands in a step."""
    return op.repeats * _iterations(graph, op.results[0], op.operands[0]) if op.boundary is Boundary.EXIT else op.repeats


def made_repeats(graph: Graph, op: Op) -> int:
    """Returns how often an op makes its results in a step."""
    return op.repeats * _iterations(graph, op.operands[0], op.results[0]) if op.boundary is Boundary.ENTER else op.repeats


def _iterations(graph: Graph, outer: int, inner: int) -> int:
    """Returns the number of slices of a stacked array; 1 for a value that is carried, or the same in every iteration."""
    if outer == LITERAL or inner == LITERAL:
        return 1
    stacked, each = graph.values[outer].shape, graph.values[inner].shape
    return stacked[0] if len(stacked) == len(each) + 1 else 1
