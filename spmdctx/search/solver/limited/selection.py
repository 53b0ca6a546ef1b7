"""A choice of states under memory that is changed node by node: repair, improvement, and flips of whole components."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.local import cost, totals
from spmdctx.search.solver.problem.memory import Rows

MAX_MOVES = 0.25
"""The share of the offered changes that one pass of a repair makes."""


class Amounts:
    """The usage of a graph's present states; `of[v]` is None if node v has no row."""

    def __init__(self, graph: CostGraph, rows: Rows) -> None:
        self.rows = rows
        self.of: list[FloatArray | None] = [None if used is None else used[graph.origin[node]] for node, used in enumerate(rows.priced)]
        self.live = [node for node, used in enumerate(self.of) if used is not None]

    def chosen(self, states: Sequence[int]) -> FloatArray:
        """Returns the usage of each node in its present state."""
        amounts = np.zeros(len(self.of))
        for node in self.live:
            amounts[node] = self.of[node][states[node]]  # type: ignore[index]  # limited to nodes that have usages
        return amounts

    def usage(self, states: Sequence[int]) -> FloatArray:
        """Returns the usage of each row."""
        return self.rows.usage(self.chosen(states))

    def least(self) -> list[int]:
        """Returns the states of least usage."""
        return [0 if used is None else int(used.argmin()) for used in self.of]


class Selection:
    """A choice of states with its usage of every row and, by node, the cost of every state given the neighbours."""

    def __init__(self, graph: CostGraph, amounts: Amounts, states: Sequence[int]) -> None:
        self.graph = graph
        self.amounts = amounts
        self.states = list(states)
        self.usage = amounts.usage(states)
        self._totals: dict[int, FloatArray] = {}
        # A smaller gain may be rounding.
        value = self.cost()
        self._rounding = 1e-13 * abs(value) if np.isfinite(value) else 0.0

    def cost(self) -> float:
        """Returns the cost, with the graph's constant."""
        return cost(self.graph, self.states) + self.graph.base

    def fits(self) -> bool:
        """Returns whether every row is within the limit."""
        return self.amounts.rows.excess(self.usage) <= 0

    def totals(self, node: int) -> FloatArray:
        """Returns the costs of a node's states beside its neighbours' present ones."""
        total = self._totals.get(node)
        if total is None:
            total = self._totals[node] = totals(self.graph, node, self.states)
        return total

    def room(self, node: int) -> float:
        """Returns the usage that a node may add."""
        most = self.amounts.rows.most
        pieces = self.amounts.rows.ranges[node]
        return min(((most - float(self.usage[first:last].max())) / count for first, last, count in pieces), default=np.inf)

    def move(self, node: int, state: int) -> None:
        """Gives a node another state."""
        used = self.amounts.of[node]
        if used is not None:
            change = used[state] - used[self.states[node]]
            if change:
                for first, last, count in self.amounts.rows.ranges[node]:
                    self.usage[first:last] += count * change
        self.states[node] = state
        for other in self.graph.links[node]:
            self._totals.pop(other, None)

    def repair(self, expired: Callable[[], bool]) -> bool:
        """Lowers usage until all rows fit, cheapest per unit first; returns False if no change of one node helps.

        Every pass sorts the changes by cost per unit of excess that they save, and makes each that still saves something.
        """
        rows = self.amounts.rows
        while rows.excess(self.usage) > 0 and not expired():
            weights = rows.weights(np.maximum(self.usage - rows.most, 0.0))
            offers = [offer for node in np.flatnonzero(weights).tolist() if (offer := self._saving(node, weights[node])) is not None]
            offers.sort()
            moved = 0
            for rate, node, _ in offers:
                if moved and moved >= MAX_MOVES * len(offers):
                    break
                if self.room(node) < 0:
                    again = self._saving(node, weights[node])
                    if again is not None and again[0] <= rate + 0.1 * abs(rate):
                        self.move(node, again[2])
                        moved += 1
            if not moved:
                return False
        return rows.excess(self.usage) <= 0

    def _saving(self, node: int, weight: float) -> tuple[float, int, int] | None:
        """Finds the change of a node that saves usage at the least cost per unit; returns that rate, the node and the state."""
        used = self.amounts.of[node]
        if used is None or len(used) == 1:
            return None
        state = self.states[node]
        saved = used[state] - used
        if not (saved > 0).any():
            return None
        total = self.totals(node)
        now = total[state] if np.isfinite(total[state]) else float(np.max(total, initial=0.0, where=np.isfinite(total)))
        rate = np.full(len(used), np.inf)
        np.divide(total - now, saved * weight, out=rate, where=saved > 0)
        best = int(rate.argmin())
        return (float(rate[best]), node, best) if np.isfinite(rate[best]) else None

    def improve(self, expired: Callable[[], bool]) -> None:
        """Gives nodes better states as long as they fit, in the order of the nodes, until none improves."""
        waiting = [node for node in self.graph.nodes() if self.graph.size(node) > 1]
        for _ in range(50):
            changed: set[int] = set()
            for node in waiting:
                if self._improve_node(node):
                    changed.add(node)
                    changed.update(self.graph.links[node])
            if not changed or expired():
                return
            # A change also makes room for nodes that are live at the same time; they come in the next pass over all.
            waiting = sorted(changed)

    def _improve_node(self, node: int) -> bool:
        total, state = self.totals(node), self.states[node]
        better = total + 1e-12 * np.abs(total) < total[state]
        if not better.any():
            return False
        used = self.amounts.of[node]
        if used is not None:
            better &= used <= used[state] + max(self.room(node), 0.0)
            if not better.any():
                return False
        self.move(node, int(np.where(better, total, np.inf).argmin()))
        return True

    def flip(self, other: Sequence[int]) -> None:
        """Takes over the states of another choice, component by component of the differing nodes, where that is cheaper and fits."""
        gains = []
        for component in components(self.graph, self.states, other):
            gain, change = self._exchange(component, other)
            if gain > self._rounding:
                gains.append((-gain / max(float(change.max(initial=0.0)), 1e-300), component, change))
        for _, component, change in sorted(gains, key=lambda entry: (entry[0], entry[1])):
            if self.amounts.rows.excess(self.usage + change) <= 0:
                for node in component:
                    self.move(node, other[node])

    def take(self, chosen: dict[int, int]) -> bool:
        """Takes over the chosen states of some nodes, all of them, if that is cheaper and fits."""
        changed = [node for node, state in chosen.items() if state != self.states[node]]
        if not changed:
            return False
        gain, change = self._exchange(changed, chosen)
        if not gain > self._rounding or self.amounts.rows.excess(self.usage + change) > 0:
            return False
        for node in changed:
            self.move(node, chosen[node])
        return True

    def _exchange(self, component: list[int], other: Sequence[int] | dict[int, int]) -> tuple[float, FloatArray]:
        """Returns the cost that a component saves by taking over the other states, and the change of the rows' usage."""
        arrays, inside = self.graph.pool.arrays, set(component)
        gain, change = 0.0, np.zeros(len(self.usage))
        for node in component:
            gain += float(self.graph.costs(node)[self.states[node]] - self.graph.costs(node)[other[node]])
            for neighbour, number in self.graph.links[node].items():
                table = arrays[number]
                if neighbour not in inside:
                    gain += float(table[self.states[node], self.states[neighbour]] - table[other[node], self.states[neighbour]])
                elif node < neighbour:
                    gain += float(table[self.states[node], self.states[neighbour]] - table[other[node], other[neighbour]])
            used = self.amounts.of[node]
            if used is not None:
                for first, last, count in self.amounts.rows.ranges[node]:
                    change[first:last] += count * (used[other[node]] - used[self.states[node]])
        return gain, change


def components(graph: CostGraph, states: Sequence[int], other: Sequence[int]) -> list[list[int]]:
    """Returns the connected components of the nodes that differ in two choices, by their lowest node."""
    differing = {node for node in graph.nodes() if states[node] != other[node]}
    found = []
    for seed in sorted(differing):
        if seed not in differing:
            continue
        differing.discard(seed)
        component, waiting = [seed], [seed]
        while waiting:
            for neighbour in graph.links[waiting.pop()]:
                if neighbour in differing:
                    differing.discard(neighbour)
                    component.append(neighbour)
                    waiting.append(neighbour)
        found.append(sorted(component))
    return found
