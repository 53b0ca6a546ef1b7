"""XLA on TPU inlines calls before it partitions, and merges equal collectives of what was in different calls.

What XLA does: it inlines the calls of custom derivatives, calls that hold constants, and remats without a barrier: those of a forward pass,
    and all with `prevent_cse=False`. It merges equal ops and the equal collectives after them, so a value that a forward and a
    backward pass both gather is gathered once. Behind the barrier of a remat it is gathered again.
Seen in: libtpu 0.0.42, v5e:2x4: attention kernels that take their operands whole, in a custom derivative that calls itself, and in a
    remat with `prevent_cse=False`: three all_gathers of queries, keys and values instead of six, and six in a remat with a barrier.
    CUDA plugin 0.10.2 and jaxlib 0.10.2 for CPU communicate again what such bodies compute again.
Switch: none: a property of compilers that follows from other switches
Priced by: cost.price.moves, cost.price.reductions; trace.build.build finds the equal ops.
Written or prevented by: nothing
Checked by: tests/machine/xla/test_inlining.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmdctx.ir.graph import LITERAL, Graph
from spmdctx.ir.primitives import IDENTITIES
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.topology import Compiler


class MergedCopies(NamedTuple):
    """The ops that the compiler merges with an earlier one, and for each value the first that is equal to it."""

    ops: frozenset[int]
    same: list[int]


def merged_scopes(inlined: Iterable[tuple[int, int]], scopes: Sequence[int]) -> Sequence[int]:
    """Returns for each op the computation that it is in once calls are inlined.

    Args:
        inlined: pairs of computations, of which compilers inline the first into the second (`Graph.inlined`); callers come first.
        scopes: per op the computation that it belongs to (`Program.scopes`).
    """
    into: dict[int, int] = {}
    for inner, outer in inlined:
        into[inner] = into.get(outer, outer)
    return [into.get(scope, scope) for scope in scopes] if into else scopes


def merged_copies(graph: Graph, assignment: Assignment, same: list[int], compiler: Compiler) -> MergedCopies:
    """Returns what the compiler merges once calls are inlined: equal ops that are split alike, of operands that are stored alike.

    Args:
        graph: the step.
        assignment: its shardings.
        same: for each value, the one that it is another name of.
        compiler: the compiler.
    """
    if not graph.copies or not compiler.merges_inlined:
        return MergedCopies(frozenset(), same)
    merged, found, stored = set[int](), [*same, LITERAL], assignment.values
    first_of = dict(graph.copies)
    for op in graph.ops:
        if op.primitive in IDENTITIES:
            found[op.results[0]] = found[op.operands[0]] if op.operands[0] != LITERAL else op.results[0]
        if op.id not in first_of:
            continue
        twin = graph.ops[first_of[op.id]]
        pairs = [*zip(op.operands, twin.operands, strict=True), *zip(op.results, twin.results, strict=True)]
        alike = all(stored[one] == stored[other] for one, other in pairs if one != LITERAL)
        equal = all(found[one] == found[other] for one, other in pairs[: len(op.operands)])
        if alike and equal and assignment.ops[op.id].axes == assignment.ops[twin.id].axes:
            merged.add(op.id)
            for one, other in zip(op.results, twin.results, strict=True):
                found[one] = found[other]
    return MergedCopies(frozenset(merged), found[:-1])
