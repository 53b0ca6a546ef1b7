"""The improvement of a choice that fits, by trees and forests at scaled prices.

Trees are taken over if they fit; forests are repaired if they do not.
"""

from __future__ import annotations

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.limited.forest import best_states, forest, tree
from spmdctx.search.solver.limited.selection import Amounts, Selection
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.unlimited.run import SolverRun

TREE_SCALES = (0.5, 0.25, 0.0, 2.0, 1.0)
"""Multiples of the prices at which trees are solved in turn: low prices use up room, high ones make it."""
TREE_SIZES = (30, 100, 300)
FOREST_SCALES = (1.0, 0.5, 0.25, 0.7)
MIN_TREES, MAX_TREES = 20, 100


class Polish:
    """Rounds of improvement for one choice; `best` is the cheapest that fits. The order is random but always the same."""

    def __init__(self, graph: CostGraph, amounts: Amounts, weights: FloatArray, states: list[int], search: SolverRun) -> None:
        self.graph = graph
        self.amounts = amounts
        self.weights = weights
        self.search = search
        self.best = Selection(graph, amounts, states)
        self.cost = self.best.cost()
        self._random = np.random.default_rng(0)
        self._nodes = np.array(graph.nodes())
        self._seeds = [node for node in graph.nodes() if len(graph.links[node]) > 1] or graph.nodes()
        self._turn = 0

    def run(self, num_rounds: int, target: float) -> None:
        """Improves the choice by trees; then each round disturbs it by a forest, repairs it, improves it, and keeps it if cheaper.

        Stops at a cost of `target`.
        """
        self._trees(self.best)
        self.cost = self.best.cost()
        for number in range(num_rounds):
            if self.search.expired() or self.cost <= target:
                return
            other = self._disturbed(FOREST_SCALES[number % len(FOREST_SCALES)])
            if other is None:
                continue
            self._trees(other)
            # Parts of the disturbed choice may be better even if the whole is not.
            self.best.flip(other.states)
            self.cost = self.best.cost()
            other.flip(self.best.states)
            if other.cost() < self.cost and other.fits():
                self.best, self.cost = other, other.cost()

    def _disturbed(self, scale: float) -> Selection | None:
        states = list(self.best.states)
        nodes = forest(self.graph, self._random.permutation(self._nodes).tolist())
        for node, state in best_states(self.graph, self.amounts, scale * self.weights, nodes, states).items():
            states[node] = state
        other = Selection(self.graph, self.amounts, states)
        if not other.repair(self.search.expired):
            return None
        other.improve(self.search.expired)
        return other

    def _trees(self, found: Selection) -> None:
        """Solves trees around random nodes, and takes over states that are cheaper and fit."""
        for _ in range(min(max(len(self._seeds) // 2, MIN_TREES), MAX_TREES)):
            if self.search.expired():
                return
            self._turn += 1
            seed = self._seeds[int(self._random.integers(len(self._seeds)))]
            nodes = tree(self.graph, seed, TREE_SIZES[self._turn % len(TREE_SIZES)])
            scale = TREE_SCALES[self._turn % len(TREE_SCALES)]
            found.take(best_states(self.graph, self.amounts, scale * self.weights, nodes, found.states))
