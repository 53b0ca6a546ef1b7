"""The memory of a planning problem: the bytes that each node occupies in each state, and the times at which it does.

The rows are the search's lower bound of the bill: `cost.price.memory` may count more at an op, and never less.

A node has one usage per state. Other memory that its state causes needs an auxiliary node, which costs nothing and is joined to the
node by an edge of zeros and infinities. Such memory is the copy that a use gathers, and on request the copies that an op makes for itself.

Short-lived values are partly on the chip instead of in memory. Therefore every op has two rows. The first counts all live values and
adds the chip's bytes to the limit; the second leaves out the values that may be on the chip.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from spmdctx.cost.memory.lives import Peak, StepMemory
from spmdctx.ir.rule import FactorKind
from spmdctx.search.problem.memory.copies import CopyRows, Passing
from spmdctx.search.problem.network import Network, Source
from spmdctx.search.problem.tables import Tables
from spmdctx.search.solver.problem.memory import usage_over_time
from spmdctx.search.solver.problem.problem import Problem


def with_memory(
    tables: Tables,
    problem: Problem,
    memory: StepMemory,
    limit: float,
    passing: Collection[Passing] = (),
    *,
    only_stored: bool = False,
    spread: float = 0.0,
) -> Problem:
    """Returns the problem with the budget `limit` in bytes; its states begin with those of the problem without a budget.

    The problem counts values as they are stored, and rows that ops look up or scatter. Unless `only_stored`, it also counts gathered
    copies, and the copies of `passing`. What is no argument counts more by the share `spread`; so does the next value of an argument,
    which is in the same slot. The chip's share (`on_chip`), `spread` included, is part of the limit.
    """
    builder = CopyRows(tables, problem, spread)
    builder.add_values(memory)
    builder.add_rows_of_ops(memory)
    if not only_stored:
        builder.add_copies(memory)
        builder.add_own_copies(memory, passing)
        builder.add_rows_off_chip(memory)
    return builder.problem(limit)


def op_at(memory: StepMemory, time: int) -> int:
    """Returns the op that runs at a time of the problem; -1 if there is none."""
    return time if time < 0 else time % max(len(memory.times), 1)


def completed(problem: Problem, states: Sequence[int]) -> tuple[int, ...]:
    """Completes the states of the first nodes of a problem with memory by the cheapest states of its auxiliary nodes."""
    found, totals = list(states), [np.array(costs) for costs in problem.costs[len(states) :]]
    for left, right, table in problem.edges:
        if left < len(found) <= right:
            totals[right - len(found)] += table[found[left]]
    return (*found, *(int(total.argmin()) for total in totals))


def passing_at(network: Network, memory: StepMemory, time: int) -> list[Passing]:
    """Lists the edges and results that may have copies in memory for one op alone at this time."""
    ops, nodes = network.space.graph.ops, network.nodes
    # The set is only tested for membership, so its order does not matter.
    classes = {network.folded.op_class[op.id] for op in ops if memory.runs[op.id] <= time <= memory.times[op.id] + 1}
    found: list[Passing] = []
    for carry in network.carries:
        if carry.target in classes or (carry.source.node in classes and nodes[carry.target].sort == "slot"):
            found.append(carry)
    for node in sorted(classes - {-1}):
        op = ops[nodes[node].member]
        if FactorKind.REDUCTION in op.rule.kinds:
            found += [Source(node, result) for result in range(len(op.results))]
    return found


def counted_bytes(problem: Problem, states: Sequence[int]) -> float:
    """Returns the most bytes alive at once in a choice of states, as the problem counts them."""
    memory = problem.memory
    if memory is None:
        return 0.0
    return float(usage_over_time(memory, [usage[state] for usage, state in zip(memory.usages, states, strict=True)]).max())


def least_peak(problem: Problem) -> Peak:
    """Returns the time at which most bytes are alive if every node occupies as little as it can, and those bytes."""
    if problem.memory is None:
        return Peak(0, 0)
    alive = usage_over_time(problem.memory, [usage.min() for usage in problem.memory.usages])
    return Peak(int(alive.argmax()), int(alive.max()))
