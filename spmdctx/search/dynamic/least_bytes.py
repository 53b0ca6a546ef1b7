"""A quick bound on the bytes alive: every value split as far as its shape allows, on whichever mesh allows most."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from spmdctx.cost.memory.lives import compiled_memory
from spmdctx.cost.step import Step
from spmdctx.ir.domain import domain
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.narrowing import kept_share
from spmdctx.search.problem.memory.stored import on_chip


def least_bytes(step: Step, meshes: Sequence[LogicalMesh], topology: Topology) -> float:
    """Returns bytes that every plan on one of the meshes takes at its peak; values from literals count nothing."""
    graph = step.graph
    memory = compiled_memory(graph, step.scopes, step.donated, topology.compiler)

    @cache
    def slices(shape: tuple[int, ...]) -> int:
        return max((int(domain(mesh, shape).slices.max()) for mesh in meshes), default=1)

    change = np.zeros(max((life.end for life in memory.lives), default=0) + 2)
    for value, start, end in memory.lives:
        if value in step.from_literals:
            continue
        known = graph.values[value]
        share = kept_share(known, memory.narrow, topology)
        size = share * known.num_bytes / slices(known.shape)
        change[start] += size
        change[end + 1] -= size
    return max(0.0, float(np.cumsum(change).max()) - on_chip(topology, graph).total_bytes)
