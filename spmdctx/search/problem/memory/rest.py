"""Rows of memory that also count, at each time, what a plan takes beside what the rows know of.

Copies that products keep until they run last, and what XLA reserves for results, depend on the whole plan. A plan that was billed tells how
much they take, and when. So the next search leaves that much at those times, and all of the budget at others. Such rows are an estimate,
and prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.problem.memory import usage_over_time
from spmdctx.search.solver.problem.problem import Life, Memory, Problem

_EVEN = 0.02
"""Share of a plan's peak within which what is left at neighbouring times counts as the same: rows that differ take longer to search."""


def with_rest_node(problem: Problem) -> Problem:
    """Adds the node that stands for the rest to a problem with memory: its last one, of one state and one byte, which lives nowhere."""
    assert problem.memory is not None
    memory = replace(problem.memory, usages=(*problem.memory.usages, np.ones(1)))
    return replace(problem, costs=(*problem.costs, np.zeros(1)), memory=memory)


def with_rest(problem: Problem, rest: Sequence[Life]) -> Problem:
    """Returns a problem whose rows also count the lives of its last node, as `rest_of` finds them."""
    assert problem.memory is not None
    return replace(problem, memory=replace(problem.memory, lives=(*problem.memory.lives, *rest))) if rest else problem


def rest_of(problem: Problem, states: Sequence[int], alive: FloatArray, most: float) -> tuple[Life, ...]:
    """Returns lives of the last node that take what a plan has in memory beside what is counted of its states.

    Args:
        problem: a problem of `with_rest_node`, without a rest.
        states: the states of which the plan is made.
        alive: the plan's bytes at each time, and those that the limit allows beside the budget.
        most: the part of what is left at a time, where every node takes as little as it can, that the rest may take of it.
    """
    assert problem.memory is not None
    memory, own = problem.memory, [float(usage[state]) for usage, state in zip(problem.memory.usages, states, strict=True)]
    counted, least = _over(memory, own, len(alive)), _over(memory, [float(usage.min()) for usage in memory.usages], len(alive))
    left = np.minimum(alive - counted, most * (memory.limit - least)).clip(min=0.0)
    node, even = len(problem.costs) - 1, _EVEN * float(alive.max())
    lives, start, low, high = list[Life](), 0, math.inf, 0.0
    for time, size in enumerate(left.tolist()):
        if max(high, size) - min(low, size) > even:
            lives.append(Life(node, start, time, high))
            start, low, high = time, size, size
        low, high = min(low, size), max(high, size)
    return tuple([life for life in (*lives, Life(node, start, len(alive), high)) if life.share > 0])


def _over(memory: Memory, used: Sequence[float], count: int) -> FloatArray:
    """Returns the usage at each of the first times."""
    found = usage_over_time(memory, used)[:count]
    return np.concatenate([found, np.zeros(count - len(found))])


def most_of(rest: Sequence[Life], other: Sequence[Life]) -> tuple[Life, ...]:
    """Returns the lives of a rest that takes, at each time, the larger one of two rests."""
    lives = (*rest, *other)
    ends = sorted({time for life in lives for time in (life.start, life.end)})
    most = [0.0] * len(ends)
    place = {time: number for number, time in enumerate(ends)}
    for life in lives:
        for number in range(place[life.start], place[life.end]):
            most[number] = max(most[number], life.share)
    return tuple([Life(lives[0].node, start, end, own) for (start, end), own in zip(pairwise(ends), most, strict=False) if own > 0])
