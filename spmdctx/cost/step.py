"""Bills an assignment of the step as the searches see it."""

from __future__ import annotations

from dataclasses import replace

from spmdctx.cost.bill import Bill
from spmdctx.cost.price import price
from spmdctx.cost.price.assigned import Step
from spmdctx.cost.price.directives import Directives
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.topology import Topology

__all__ = ["Step", "bill_of"]


def bill_of(step: Step, assignment: Assignment, mesh: LogicalMesh, topology: Topology, directives: Directives | None = None) -> Bill:
    """Returns the bill of an assignment, without the collectives that the user wrote.

    It keeps the last bills, because the planner needs one that the search made. So callers may pass only those `directives` that
    `price` would find by itself.
    """
    bill: Bill | None = next((own for known, *of, own in step.last_bills if known is assignment and of == [mesh, topology]), None)
    if bill is None:
        bill = price(step, assignment, mesh, topology, directives)
        step.last_bills.append((assignment, mesh, topology, bill))
    return replace(bill, collectives=[*bill.collectives], shares=[*bill.shares], moves=[*bill.moves])
