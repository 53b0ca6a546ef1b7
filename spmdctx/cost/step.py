"""The step as the searches see it, and what an assignment of it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spmdctx.cost.bill import Bill
from spmdctx.cost.price import price
from spmdctx.ir.graph import Graph
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.topology import Topology


@dataclass(frozen=True)
class Step:
    """The step that is planned, without JAX; see `trace.build.program.Program`. `donated` are input values."""

    graph: Graph
    scopes: tuple[int, ...]
    loose: frozenset[int]
    donated: frozenset[int]


def bill_of(step: Step, assignment: Assignment, mesh: LogicalMesh, topology: Topology) -> Bill:
    """The bill of an assignment, without collectives of the user's own. The last one is kept: a search asks, and then the planner."""
    known = step.graph.facts.get(bill_of)
    asked = (assignment, mesh, topology, step.donated)
    if known is None or known[0][0] is not assignment or known[0][1:] != asked[1:]:
        known = step.graph.facts[bill_of] = asked, price(step.graph, step.scopes, step.loose, (), assignment, mesh, topology, step.donated)
    bill: Bill = known[1]
    return replace(bill, collectives=[*bill.collectives], shares=[*bill.shares], moves=[*bill.moves])
