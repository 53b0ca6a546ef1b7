"""What dynamic programming is told, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from spmdctx.cost.step import Step
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.topology import Topology
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.meshes import MAX_AXES, candidate_meshes
from spmdctx.search.setup.request import Setup

SMALL_PROGRAM = 100
"""Ops up to which meshes of three axes are tried unasked, and budgets are worth every proof."""


def is_small(step: Step) -> bool:
    """Whether a program has at most `SMALL_PROGRAM` ops."""
    return len(step.graph.ops) <= SMALL_PROGRAM


@dataclass(frozen=True, slots=True)
class DynamicOptions:
    """What the search is asked for.

    Attributes:
        memory_bytes: budget per device, None for none.
        limits: parameters of the search.
        is_soft: whether nobody set the budget, so that little time is spent on it.
        wants_any: whether the first plan within the budget will do.
        max_axes: of the meshes that are tried; None for three where the program has at most `SMALL_PROGRAM` ops, else two.
    """

    memory_bytes: int | None = None
    limits: AlgoLimits = field(default_factory=AlgoLimits)
    max_axes: int | None = None
    is_soft: bool = False
    wants_any: bool = False

    def meshes(self, step: Step, num_devices: int, topology: Topology) -> list[LogicalMesh]:
        """The meshes to try."""
        most = self.max_axes or (MAX_AXES if is_small(step) else 2)
        return candidate_meshes(num_devices, topology, most)


class Found(NamedTuple):
    """The best assignment on one mesh.

    `cost_s` is what the search minimises, `lower_bound_s` what no assignment in its space goes below.
    """

    setup: Setup
    assignment: Assignment
    cost_s: float
    lower_bound_s: float
    counts: Mapping[str, int]


class Shortfall(NamedTuple):
    """No plan on the mesh fits: the op at which memory runs out, the least bytes alive there, and a budget that may suffice.

    `fastest` is the best plan without the budget. `is_proven` where no plan at all takes fewer than `least_bytes` at its peak; else
    no such plan was found. No plan within the budget that was missed is below `lower_bound_s`.
    """

    time: int
    least_bytes: int
    enough_bytes: int
    fastest: Found
    is_proven: bool = False
    lower_bound_s: float = 0.0


class Beaten(NamedTuple):
    """Nothing on the mesh is cheaper than what was found on another one."""

    lower_bound_s: float
