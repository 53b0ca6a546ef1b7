"""The options of dynamic programming, the results of a search, and the protocol of all searches."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from spmdctx.cost.memory.lives import Peak
from spmdctx.cost.step import Step
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic import effort
from spmdctx.search.problem.fold import FOLDING, Folding
from spmdctx.search.problem.orbits import Precedents
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.meshes import MAX_AXES, candidate_meshes
from spmdctx.search.setup.request import Request, Setup
from spmdctx.wording import bytes_text, mesh_text, seconds_text
from spmdctx.wording.phases import log_of

_LOG = log_of("search")

SAME_COST = 5e-10
"""Share of a cost below which two costs count as equal."""


@dataclass(frozen=True, slots=True)
class DynamicOptions:
    """The options of the search.

    Attributes:
        memory_bytes: budget per device, None for none.
        limits: parameters of the search.
        max_axes: of the meshes that are tried; None for three if the program has at most `small_program` ops, else two.
        is_soft: whether the budget is not the user's, so that little time is spent on it.
        is_of_a_part: whether the program is one of many parts that are planned one by one, so that less is spent on such a budget.
        is_likely: whether the likely peak is to be within the budget, and not the safe one.
        wants_any: whether any plan within the budget will do.
        is_brief: whether this is one of many budgets, so that little work is spent on proofs.
        is_rough: whether the plan only tells how plans compare, so that it is not improved within a budget that the user did not set.
        is_interruptible: whether an interrupt of the keyboard (Ctrl-C) ends the search with the best plan so far, if there is one.
        small_program: ops up to which meshes of three axes are tried by default, and budgets are worth every proof.
        middle_program: ops up to which all work within a budget is limited; above, only that on proofs.
        large_program: ops from which proofs within a user's budget are limited mesh by mesh, attempts at any plan take more work, and a
            budget that the user did not set is given up if a hasty attempt finds no plan.
        precedents: plans of programs alike, from which searches within the budget start, and to which their plans are added.
        schedule: the attempts within a budget; None to derive them from the program's size and the other options.
        folding: the options of the fold that decides ops together.
    """

    memory_bytes: int | None = None
    limits: AlgoLimits = field(default_factory=AlgoLimits)
    max_axes: int | None = None
    is_soft: bool = False
    is_of_a_part: bool = False
    is_likely: bool = False
    wants_any: bool = False
    is_brief: bool = False
    is_rough: bool = False
    is_interruptible: bool = False
    small_program: int = 100
    middle_program: int = 500
    large_program: int = 5000
    precedents: Precedents | None = None
    schedule: effort.Schedule | None = None
    folding: Folding = FOLDING

    def is_small(self, step: Step) -> bool:
        """Returns whether a program has at most `small_program` ops."""
        return len(step.graph.ops) <= self.small_program

    def meshes(self, step: Step, num_devices: int, topology: Topology) -> list[LogicalMesh]:
        """Lists the meshes to try."""
        most = self.max_axes or (MAX_AXES if self.is_small(step) else 2)
        return candidate_meshes(num_devices, topology, most)

    def for_any_plan(self, step: Step) -> DynamicOptions:
        """Returns the options of a search for any plan within the budget."""
        return replace(self, wants_any=True, schedule=effort.ENOUGH_PLAN if self.is_small(step) else None)

    def schedule_of(self, step: Step) -> effort.Schedule:
        """Returns the attempts that the budget is worth."""
        if self.schedule is not None:
            return self.schedule
        if self.is_brief:
            return effort.BRIEF_PLAN if self.is_small(step) else effort.BRIEF_LARGE_PLAN
        if self.is_small(step):
            return effort.ANY_PLAN if self.wants_any else effort.SOFT_PLAN if self.is_soft else effort.PROVEN_PLAN
        if self.wants_any:
            return effort.SHORT_HASTY_PLAN if len(step.graph.ops) < self.large_program else effort.HASTY_PLAN
        if not self.is_soft and len(step.graph.ops) <= self.middle_program:
            return effort.MIDDLE_PLAN
        if not self.is_soft:
            return effort.LARGE_PLAN if len(step.graph.ops) < self.large_program else effort.LARGEST_PLAN
        if self.is_rough:
            return effort.ROUGH_PLAN
        if len(step.graph.ops) < self.large_program:
            return effort.PART_PLAN if self.is_of_a_part else effort.QUICK_PLAN
        return effort.PART_PLAN_OR_NONE if self.is_of_a_part else effort.QUICK_PLAN_OR_NONE


class Found(NamedTuple):
    """The best assignment on one mesh.

    `cost_s` is the cost that the search minimises; no assignment in its space costs less than `lower_bound_s`, unless the search
    `is_interrupted`, which leaves no bound.
    """

    setup: Setup
    assignment: Assignment
    cost_s: float
    lower_bound_s: float
    counts: Mapping[str, int]
    is_interrupted: bool = False


class Shortfall(NamedTuple):
    """No plan on the mesh fits: the op at which memory runs out, the least bytes alive there, and a budget that may suffice.

    `fastest` is the best plan without the budget. If `is_proven`, every plan takes at least `least_bytes` at its peak; else the search
    found no smaller one. If it `is_cut`, the search ended early, as no plan was in sight. No plan within the budget that the search missed
    costs less than `lower_bound_s`. `joined` names the axes that the search used only together, so that it proves nothing of other plans.
    """

    time: int
    least_bytes: int
    enough_bytes: int
    fastest: Found
    is_proven: bool = False
    lower_bound_s: float = 0.0
    is_cut: bool = False
    joined: str = ""


class Beaten(NamedTuple):
    """No plan on the mesh is cheaper than one that was found on another mesh."""

    lower_bound_s: float


class Search(Protocol):
    """A search for the cheapest plan of one step within its budget; a search mode is one class of them."""

    def plan(self, request: Request) -> Found | Shortfall:
        """Finds the cheapest plan on any mesh that the request leaves open."""
        ...

    def search(self, setup: Setup, known_s: float = float("inf")) -> Found | Shortfall | Beaten:
        """Finds the cheapest plan on the mesh of a set-up, if there is one below `known_s`."""
        ...


def better(earlier: Found | Shortfall | Beaten | None, later: Found | Shortfall | Beaten, known_s: float) -> Found | Shortfall | Beaten:
    """Returns the better result of two attempts; the bounds of both hold."""
    if not isinstance(earlier, Found) or (isinstance(later, Found) and later.cost_s <= earlier.cost_s):
        return later
    bound_s = max(earlier.lower_bound_s, later.lower_bound_s)
    return Beaten(bound_s) if bound_s >= known_s else earlier._replace(lower_bound_s=min(bound_s, earlier.cost_s))


def short_of(nearest: Peak, fastest: Found, bound_s: float) -> Shortfall:
    """Returns the shortfall if no plan was found; `nearest` is the lowest peak seen."""
    return Shortfall(nearest.time, nearest.bytes, nearest.bytes, fastest, lower_bound_s=bound_s)


def standing_of(result: Found | Shortfall | Beaten, known_s: float, *, has_run_out: bool) -> effort.Standing:
    """Returns the state of the search of a mesh after an attempt."""
    cost_s = result.cost_s if isinstance(result, Found) else math.inf
    is_settled = isinstance(result, Beaten) or (isinstance(result, Shortfall) and result.is_proven)
    return effort.Standing(known_s, cost_s, result.lower_bound_s, is_begun=True, is_settled=is_settled, has_run_out=has_run_out)


def log_mesh(mesh: LogicalMesh, found: Found | Shortfall | Beaten, memory_bytes: int | None = None) -> None:
    """Logs what came of the search of a mesh."""
    if not _LOG.isEnabledFor(logging.INFO):
        return
    within = "" if memory_bytes is None else f" within {bytes_text(memory_bytes)} per device"
    if isinstance(found, Found):
        what = f"{seconds_text(found.cost_s)} a step"
    else:
        what = "no plan" if isinstance(found, Shortfall) else f"no plan below {seconds_text(found.lower_bound_s)} a step"
    _LOG.info("Mesh %s: %s%s.", mesh_text(mesh), what, within)
