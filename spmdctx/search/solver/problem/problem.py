"""The problem that the solver solves, in numbers only: no graph, no mesh, no sharding.

Choose one state `x_v` for every node `v`:

    minimise    sum_v costs[v][x_v]  +  sum_e tables[e][x_left(e), x_right(e)]
    subject to  for every time t:  sum of share * usages[v][x_v] over the lives (v, start, end, share) with start <= t < end  <=  limit

Infinite costs forbid a state or a pair of states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spmdctx.ir.arrays import FloatArray


class Edge(NamedTuple):
    """A pairwise cost: `table[i, j]` if node `left` is in state i and `right` in state j.

    Edges that cost the same may share one table object; the solver memoises by the object.
    """

    left: int
    right: int
    table: FloatArray


class Life(NamedTuple):
    """Node `node` occupies `share` times its usage at all times `start <= t < end`. A node may have several lives, also at one time."""

    node: int
    start: int
    end: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Memory:
    """The usage of each node in each state, and the times at which nodes are live."""

    usages: tuple[FloatArray, ...]
    lives: tuple[Life, ...]
    limit: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Costs per node and state, pairwise costs, and the memory if it is limited. Nodes may share one cost array."""

    costs: tuple[FloatArray, ...]
    edges: tuple[Edge, ...]
    memory: Memory | None = None


class Known(NamedTuple):
    """Choices of states to start from, which need not fit the memory, and a lower bound on the cost of every choice.

    `prices` are times at which memory may bind, each with the cost of one unit of usage, as a like problem's solution has them. A plan made
    of the choices is `near` enough at this gap, relative to its cost: then a wide problem is searched no further.
    """

    choices: tuple[tuple[int, ...], ...]
    lower_bound: float
    prices: tuple[tuple[int, float], ...] = ()
    near: float = 0.0


class Solution(NamedTuple):
    """A state per node, its cost, and a lower bound on the cost of every feasible choice.

    `counts` describes the solver's work (states discarded by dominance, nodes eliminated, largest table, ...). `met` are other choices that
    are cheapest at some price of memory, and may not fit. `prices` are those of the bound, by the times at which memory binds. Where memory
    is limited, `relaxed` is a bound that holds for mixtures of states too: of things of which a node stands for several, each in its own.
    """

    states: tuple[int, ...]
    cost: float
    lower_bound: float
    counts: dict[str, int]
    met: tuple[tuple[int, ...], ...] = ()
    prices: tuple[tuple[int, float], ...] = ()
    relaxed: float | None = None


class Infeasible(NamedTuple):
    """No choice of states fits: the time that cannot be met, the least usage possible there, and a limit that can be met.

    Unless it `is_proven`, the solver only found no choice, and no choice that fits costs less than `lower_bound`.
    """

    time: int
    least_usage: float
    smallest_limit: float
    is_proven: bool = True
    lower_bound: float = float("inf")
