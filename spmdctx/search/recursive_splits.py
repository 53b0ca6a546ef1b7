"""Which splits recursive_programming searches: axes in the order of the mesh, and of the ops that the rounds decided only their cuts.

An argument that lies split costs a trifle less than one that lies whole, so that it lies as it is read where that is free.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spmdctx.domains import axis_codes, domain
from spmdctx.ir import Role
from spmdctx.search.algo import AlgoLimits
from spmdctx.search.modes import Setup
from spmdctx.search.network import Network, Node
from spmdctx.search.solver.problem import FloatArray, Problem
from spmdctx.search.space import Space
from spmdctx.search.tables import Choices, Tables
from spmdctx.search.transfer import FactorAxes

_TRIFLE_S = 1e-15

_Kept = NDArray[np.bool_]


class FewSplits(Tables):
    """Tables whose problem forbids all other states. `cuts` are by op id the only split of an op."""

    def __init__(self, network: Network, space: Space, setup: Setup, limits: AlgoLimits, cuts: Mapping[int, FactorAxes]) -> None:
        super().__init__(network, space, setup, limits)
        self._cuts = cuts

    def problem(self) -> Problem:
        """The restricted problem, without memory."""
        every = super().problem()
        memo: dict[tuple[int, FactorAxes | None], _Kept] = {}
        costs = []
        for node, choices, own in zip(self.network.nodes, self.choices, every.costs, strict=True):
            cut = self._cuts.get(node.member) if node.sort == "op" else None
            key = (id(choices), cut)
            kept = memo.get(key)
            if kept is None:
                kept = memo[key] = self._kept(node, choices, cut)
            costs.append(self._priced(node, choices, own, kept))
        return Problem(tuple(costs), every.edges)

    def _priced(self, node: Node, choices: Choices, own: FloatArray, kept: _Kept) -> FloatArray:
        if node.sort == "slot" and self.space.graph.values[node.member].role is not Role.INTERMEDIATE:
            known = domain(self.space.mesh, self.space.graph.values[node.member].shape)
            own = own + _TRIFLE_S / known.slices[choices.stored[0]]
        # Pins and limits of the search may leave nothing else.
        return own if kept.all() or not np.isfinite(own[kept]).any() else np.where(kept, own, np.inf)

    def _kept(self, node: Node, choices: Choices, cut: FactorAxes | None) -> _Kept:
        mesh, graph = self.space.mesh, self.space.graph
        codes = axis_codes(mesh)
        straight = np.array([list(own) == sorted(own, key=mesh.names.index) for own in codes.axes])
        kept = np.ones(len(choices.seconds), dtype=bool)
        values = graph.ops[node.member].results if node.sort == "op" else (node.member,)
        for value, numbers in zip(values, choices.stored, strict=True):
            kept &= straight[domain(mesh, graph.values[value].shape).rows[numbers]].all(axis=1)
        if choices.split is not None and choices.states is not None:
            rows = choices.split.rows[choices.states.split]
            kept &= (straight[rows] if cut is None else rows == np.array([codes.code(axes) for axes in cut])).all(axis=1)
        return kept
