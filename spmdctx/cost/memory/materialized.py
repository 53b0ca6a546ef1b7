"""Says which values of a step exist in memory, and not only inside of fusions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmdctx.ir.analysis.incidence import ends
from spmdctx.ir.analysis.kinds import inside, ops_of
from spmdctx.ir.graph import LITERAL, Graph, Role
from spmdctx.ir.primitives import ANNOTATIONS, HEAVY, SCAN_EXIT


def given_values(graph: Graph) -> list[int]:
    """Returns the arguments, and the arrays that the step closes over, which are part of the program."""
    values, is_made = graph.values, np.zeros(len(graph.values), dtype=bool)
    is_made[ends(graph).results[1]] = True
    return [*graph.inputs, *(value for value in np.flatnonzero(~is_made).tolist() if values[value].role is Role.CONSTANT)]


def materialized_values(graph: Graph, given: Sequence[int]) -> bytearray:
    """Returns for each value whether it exists in memory; a last 0 stands for literals."""
    materialized, made = np.zeros(len(graph.values) + 1, dtype=np.uint8), ends(graph).results[1]
    materialized[given] = 1
    materialized[made] = ~inside(graph)[made]
    return bytearray(materialized)


def materialize_operands(graph: Graph, materialized: bytearray) -> None:
    """Puts the operands of matrix products into memory; marks are only other names of their operands."""
    for op in ops_of(graph, HEAVY):
        for value in op.operands:
            while value != LITERAL and not materialized[value]:
                maker = graph.ops[graph.producers[value]]
                if maker.primitive not in ANNOTATIONS:
                    materialized[value] = 1
                else:
                    value = maker.operands[0]


def materialize_written(graph: Graph, materialized: bytearray) -> None:
    """Puts what loops stack up into memory, also where one op alone reads it, and what is scattered, which GPUs do by no comparison."""
    for op in ops_of(graph, (SCAN_EXIT, "scatter-add")):
        materialized[op.results[0]] = 1


def settled_values(graph: Graph, materialized: bytearray) -> bytearray:
    """Returns for each value whether it exists in memory, or the op that makes it writes it there, under a mark or transposed."""
    found = bytearray(materialized)
    for op in reversed(ops_of(graph, ("transpose", *ANNOTATIONS))):
        if found[op.results[0]]:
            value = op.operands[0]
            if value != LITERAL and len(graph.readers[value]) == 1:
                found[value] = 1
    return found
