"""Rows of memory that also count what is reserved for results, as a plan has it.

What temporaries can lie in the memory of a result depends on the sizes of both, which no row can say. So a share of each result's bytes
counts before it is made: that of a plan which was billed. Such rows are an estimate, and prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmdctx.cost.memory.lives import StepMemory
from spmdctx.cost.memory.reserved import ReservedShare, results_of
from spmdctx.search.problem.tables import Tables
from spmdctx.search.solver.problem.problem import Life, Problem


def with_reserved(problem: Problem, tables: Tables, memory: StepMemory, pieces: Sequence[ReservedShare], spread: float) -> Problem:
    """Returns a problem with memory whose rows count the shares in `pieces` of all results that are made later.

    Args:
        problem: a problem that `with_memory` made.
        tables: the tables that it was made of.
        memory: the times at which the step's values are in memory.
        pieces: the shares; without any, nothing changes.
        spread: the share that counts on top of each, as in `with_memory`.
    """
    if not pieces or problem.memory is None:
        return problem
    network, space, num_ops = tables.network, tables.space, max(len(memory.times), 1)
    firsts = (0, num_ops) if any(life.start >= num_ops for life in problem.memory.lives) else (0,)
    added: list[Life] = []
    for value, start, _ in results_of(memory, frozenset(space.graph.outputs)):
        slot = space.slot_of[value]
        slot_class = network.folded.slot_class[slot]
        if slot in space.free_slots or slot_class < 0:
            continue
        node = network.slot_nodes[slot_class]
        own = [(piece, min(piece.end, start)) for piece in pieces if piece.start < start]
        added += [Life(node, first + piece.start, first + end, piece.share * (1 + spread)) for first in firsts for piece, end in own]
    return replace(problem, memory=replace(problem.memory, lives=(*problem.memory.lives, *added)))


def at_least(pieces: Sequence[ReservedShare], others: Sequence[ReservedShare]) -> tuple[ReservedShare, ...]:
    """Returns the pieces of one step of two plans, each with the larger share."""
    shares: dict[tuple[int, int], float] = {}
    for start, end, share in (*pieces, *others):
        shares[start, end] = max(share, shares.get((start, end), 0.0))
    return tuple([ReservedShare(start, end, share) for (start, end), share in sorted(shares.items())])
