"""Holds what a price is for: a step, an assignment of it, and the mesh and the machine that it runs on."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from spmdctx.ir.analysis.numbering import numbered
from spmdctx.ir.arrays import IntArray
from spmdctx.ir.graph import Graph, item_bytes
from spmdctx.ir.mesh import LogicalMesh, local_shape
from spmdctx.ir.projection import local_bytes
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.machine.topology import Topology

_KEPT_BILLS = 3
"""A search prices up to two assignments for a plan, asks for the peak of one, and the planner wants that bill once more."""


@dataclass(frozen=True)
class Step:
    """The step that is planned, without JAX; see `trace.build.program.Program`. `donated` are inputs that lend their memory."""

    graph: Graph
    scopes: tuple[int, ...]
    from_literals: frozenset[int]
    donated: frozenset[int] = frozenset()
    last_bills: deque[Any] = field(default_factory=lambda: deque(maxlen=_KEPT_BILLS), init=False, compare=False, repr=False)
    """The memo of `cost.step.bill_of`."""


@dataclass(frozen=True)
class Assigned:
    """A step with the shardings of its ops and values, on a mesh of a machine."""

    step: Step
    assignment: Assignment
    mesh: LogicalMesh
    topology: Topology
    _stored: dict[tuple[object, ...], int] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def graph(self) -> Graph:
        """The graph of the step."""
        return self.step.graph

    def stored_as(self) -> IntArray:
        """Returns one number per value; values with the same sharding object have the same number."""
        return numbered([*map(id, self.assignment.values)])

    def local_bytes(self, value: int, sharding: TensorSharding) -> int:
        """Returns the bytes of one device's block of a value in a sharding."""
        return local_bytes(self.step.graph.values[value], sharding, self.mesh)

    def stored_bytes(self, value: int, sharding: TensorSharding, narrow: bool = False) -> int:
        """Returns the bytes that a block takes in memory; `narrow` if it is kept in the type of matrix operands."""
        known = self.step.graph.values[value]
        key = (known.shape, known.dtype, narrow, sharding)
        size = self._stored.get(key)
        if size is None:
            size = item_bytes("bfloat16" if narrow else known.dtype) * math.prod(local_shape(known.shape, sharding, self.mesh))
            self._stored[key] = size
        return size
