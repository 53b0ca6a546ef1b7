"""The splits that recursive_programming searches: axes in the order of the mesh, and for ops that the rounds decided only their cuts.

An element-wise op goes with its result: it is split as the result lies, and so is an operand of the same shape that an op made.
All nodes that depend on each other in this way are one node for the solver, which leaves it a quarter of the nodes.

An argument stored split costs a trifle less than one stored whole. So it is stored as it is read where that is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.ir.domain import axis_codes, domain
from spmdctx.ir.graph import Op, Role
from spmdctx.ir.projection import FactorAxes
from spmdctx.search.problem.choices import Choices
from spmdctx.search.problem.network import PLAIN, Carry, Network, Node
from spmdctx.search.problem.space import Space
from spmdctx.search.problem.states import OpSplits
from spmdctx.search.problem.tables import Tables
from spmdctx.search.setup.limits import AlgoLimits, is_elementwise
from spmdctx.search.setup.request import Setup
from spmdctx.search.solver.problem.problem import Edge, Problem, Solution

_TRIFLE_S = 1e-15


class Joined(NamedTuple):
    """A problem that joins nodes of the network; `groups` gives the joined node of each node of the network."""

    problem: Problem
    groups: tuple[int, ...]

    def of_nodes(self, solution: Solution) -> Solution:
        """Translates a solution to the nodes of the network."""
        return solution._replace(states=tuple([solution.states[group] for group in self.groups]))


class FewSplits(Tables):
    """Tables of few splits. `cuts` gives by op id the only split of an op, if pins and limits of the search allow it."""

    def __init__(self, network: Network, space: Space, setup: Setup, limits: AlgoLimits, cuts: Mapping[int, FactorAxes]) -> None:
        self._cuts = cuts
        self._few: dict[int, Choices] = {}
        self._same: dict[tuple[int, int], bool] = {}
        codes = axis_codes(space.mesh)
        self._straight = np.array([list(own) == sorted(own, key=space.mesh.names.index) for own in codes.axes])
        self._cut_rows: dict[int, list[list[int]]] = {}
        for cut in dict.fromkeys(cuts.values()):
            self._cut_rows.setdefault(len(cut), []).append([codes.code(axes) for axes in cut])
        super().__init__(network, space, setup, limits)

    def problem(self) -> Problem:
        """Builds the restricted problem, without memory."""
        every = super().problem()
        return Problem(tuple(self._restricted(every.costs)), every.edges)

    def joined(self) -> Joined:
        """Builds the problem in which element-wise ops go with their results."""
        groups = self._groups()
        costs: dict[int, FloatArray] = {}
        own = self._restricted([choices.seconds * node.weight for choices, node in zip(self.choices, self.network.nodes, strict=True)])
        for group, seconds in zip(groups, own, strict=True):
            known = costs.get(group)
            costs[group] = seconds if known is None else known + seconds
        edges = []
        for carry, load in self.network.carries.items():
            left, right = groups[carry.source.node], groups[carry.target]
            if left == right and self._goes_with(carry):
                continue
            table = self.table(carry, load)
            if left == right:
                costs[left] = costs[left] + np.diagonal(table)
            else:
                edges.append(Edge(left, right, table))
        return Joined(Problem(tuple(costs.values()), tuple(edges)), groups)

    def _groups(self) -> tuple[int, ...]:
        """Returns the group of each node, numbered by the groups' first nodes."""
        leader = list(range(len(self.network.nodes)))

        def first(node: int) -> int:
            while leader[node] != node:
                leader[node] = node = leader[leader[node]]
            return node

        for carry in self.network.carries:
            one, other = sorted((first(carry.source.node), first(carry.target)))
            if one != other and self._goes_with(carry):
                leader[other] = one
        numbers: dict[int, int] = {}
        return tuple([numbers.setdefault(first(node), len(numbers)) for node in range(len(leader))])

    def _goes_with(self, carry: Carry) -> bool:
        """Returns whether the nodes of an edge go together, each state of one with the same state of the other."""
        source, target = carry.source.node, carry.target
        if not (self._follows[source] and self._follows[target]):
            return False
        stored, taken = self.choices[source].stored[carry.source.result], self.choices[target].taken[carry.position]
        key = (id(stored), id(taken))
        known = self._same.get(key)
        if known is None:
            known = self._same[key] = stored is taken or np.array_equal(stored, taken)
        return known

    @cached_property
    def _follows(self) -> list[bool]:
        """For each node, whether it may go with others: an element-wise op, or a value that a single op makes."""
        network, ops = self.network, self.space.graph.ops
        fixed = {network.slot_nodes[own] for own in network.fixed_slots if own in network.slot_nodes}
        known: dict[int, bool] = {}
        found = []
        for number, node in enumerate(network.nodes):
            if node.sort != "op":
                found.append(node.sort == "slot" and number not in fixed)
                continue
            rule = ops[node.member].rule
            if id(rule) not in known:
                known[id(rule)] = is_elementwise(rule)
            found.append(known[id(rule)] and node.joins == PLAIN and node.member not in self.forced)
        return found

    def allowed_splits(self, op: Op, split: OpSplits) -> OpSplits:
        """Returns the allowed splits whose axes are in the order of the mesh, and the cuts."""
        split = super().allowed_splits(op, split)
        straight = self._straight[split.rows].all(axis=1)
        for cut in self._cut_rows.get(len(op.rule.sizes), ()):
            straight |= (split.rows == cut).all(axis=1)
        kept = np.nonzero(straight)[0]
        if len(kept) in (0, len(split.rows)):
            return split
        operands, results = (tuple(own[kept] for own in side) for side in (split.operands, split.results))
        return OpSplits(split.rows[kept], operands, results)

    def choices_of(self, node: Node) -> Choices:
        """Returns the choices of a node whose results lie on axes in the order of the mesh."""
        every = super().choices_of(node)
        known = self._few.get(id(every))
        if known is None:
            known = self._few[id(every)] = self._among(node, every)
        return known

    def _among(self, node: Node, every: Choices) -> Choices:
        """Returns the choices whose results lie on axes in the order of the mesh; all choices if that leaves none."""
        mesh, graph = self.space.mesh, self.space.graph
        kept = np.ones(len(every.seconds), dtype=bool)
        values = graph.ops[node.member].results if node.sort == "op" else (node.member,)
        for value, numbers in zip(values, every.stored, strict=True):
            kept &= self._straight[domain(mesh, graph.values[value].shape).rows[numbers]].all(axis=1)
        if kept.all() or not kept.any():
            return every
        return every.among(np.nonzero(kept)[0])

    def _restricted(self, costs: Iterable[FloatArray]) -> Iterator[FloatArray]:
        """Yields the costs of the nodes' states, infinite where an op has another cut."""
        for node, choices, own in zip(self.network.nodes, self.choices, costs, strict=True):
            if node.sort == "slot" and self.space.graph.values[node.member].role is not Role.INTERMEDIATE:
                known = domain(self.space.mesh, self.space.graph.values[node.member].shape)
                own = own + _TRIFLE_S / known.slices[choices.stored[0]]
            cut = self._cuts.get(node.member) if node.sort == "op" else None
            if cut is not None and choices.split is not None and choices.states is not None:
                codes = axis_codes(self.space.mesh)
                kept = (choices.split.rows[choices.states.split] == np.array([codes.code(axes) for axes in cut])).all(axis=1)
                # Pins and limits of the search may rule out the cut.
                own = np.where(kept, own, np.inf) if np.isfinite(own[kept]).any() else own
            yield own
