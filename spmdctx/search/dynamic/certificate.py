"""The certificate of a search: the bound that it proved, stated as a bound of the plan's own price; and bounds for plans of no search."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from spmdctx.cost.step import Step
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.results import DynamicOptions, Shortfall
from spmdctx.search.dynamic.searcher import Searcher, mesh_is_fixed
from spmdctx.search.setup.blocks import is_too_wide, joined_axes, with_blocks
from spmdctx.search.setup.modes import prepare
from spmdctx.search.setup.request import Request

_ROUNDING = 1e-9
_WORTH_A_WORD = 1e-3


class Certificate(NamedTuple):
    """A bound on the costs that a search minimised, and the cost that it counted for the plan that it chose.

    Attributes:
        lower_bound_s: The search counts no assignment in its space below it.
        counted_s: The cost that the search counted for the plan; None if the plan was changed after the search.
    """

    lower_bound_s: float
    counted_s: float | None = None

    def of_price(self, total_s: float) -> tuple[float, str]:
        """Returns the bound of the price, and a sentence on the difference; the sentence is empty if both count alike.

        Moves and sums that XLA shares may make a plan cheaper than the search counted. Other plans may be cheaper by the same surplus,
        so the bound is lowered by it.

        Args:
            total_s: Price of the plan.
        """
        surplus_s = 0.0 if self.counted_s is None else self.counted_s - total_s
        if surplus_s <= _ROUNDING * total_s:
            return self.lower_bound_s, ""
        bound_s = max(0.0, self.lower_bound_s - surplus_s)
        if surplus_s < _WORTH_A_WORD * total_s:
            return bound_s, ""
        more = f"The search counted {surplus_s / total_s:.1%} more for this plan than it costs, as the compiler shares moves"
        return bound_s, f"{more}; the lower bound is lowered by as much."


def gap_of(total_s: float, bound_s: float) -> float:
    """Returns the relative distance of a price from its bound; 0 if only the order of additions differs."""
    gap = total_s / bound_s - 1 if bound_s else 0.0
    return 0.0 if abs(gap) < _ROUNDING else gap


def lower_bound_s(
    step: Step, request: Request, topology: Topology, options: DynamicOptions, mesh: LogicalMesh
) -> tuple[float | None, tuple[str, ...]]:
    """Bounds the cost of every assignment, on the meshes that the search would try or on `mesh`; memory plays no part.

    Returns the bound, None if a mesh has too many axes for the search, and the axes that it takes only together, as text: one for each
    mesh on which there are any.
    """
    searcher = Searcher(step, topology, replace(options, memory_bytes=None))
    meshes = [mesh]
    if not mesh_is_fixed(request):
        meshes += [other for other in options.meshes(step, request.num_devices, topology) if other != mesh]
    lowest = float("inf")
    setups = [with_blocks(step.graph, prepare(step.graph, replace(request, mesh=other))) for other in meshes]
    if any(is_too_wide(step.graph, setup) for setup in setups):
        return None, ()
    for setup in setups:
        found = searcher.search(setup, lowest)
        assert not isinstance(found, Shortfall)
        lowest = min(lowest, found.lower_bound_s)
    return lowest, tuple(filter(None, (joined_axes(setup.mesh) for setup in setups)))
