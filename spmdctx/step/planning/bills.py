"""Prices an assignment of a captured program, with the collectives and bodies that the user wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmdctx.context.state import AutoParallelContext
from spmdctx.cost.bill import Bill
from spmdctx.cost.bodies import Body, add_bodies
from spmdctx.cost.price import price
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.directives import Directives, directives_of
from spmdctx.cost.step import bill_of
from spmdctx.ir.collective import Collective
from spmdctx.ir.sharding import AxisNames
from spmdctx.search.optimizer.refined_mesh import refined_axes
from spmdctx.trace.build.program import Program


def written_collectives(program: Program, parts: Mapping[str, AxisNames]) -> list[Collective]:
    """Returns the collectives that the user wrote in the program, over axes of the plan's mesh."""
    return [replace(row, axes=refined_axes(row.axes, parts)) for region in program.manual for row in region.collectives]


def priced(program: Program, assigned: Assigned, context: AutoParallelContext, written: Sequence[Collective]) -> tuple[Bill, Directives]:
    """Returns the bill of an assignment, with the collectives `written` in the program, and the plan's directives."""
    step, assignment, mesh, topology = assigned.step, assigned.assignment, assigned.mesh, assigned.topology
    directives = directives_of(assigned, context, has_regions=bool(program.region_ops))
    if written or directives.buckets:
        bill = price(step, assignment, mesh, topology, directives, written)
    else:
        # A search may have asked for it already.
        bill = bill_of(step, assignment, mesh, topology, directives)
    add_bodies(bill, step.graph, _bodies(program), assignment, mesh, topology)
    return bill, replace(directives, waits=bill.early)


def _bodies(program: Program) -> list[Body]:
    """Returns the bodies of the program's shard_maps."""
    return [
        Body(region.op, region.repeats, region.body.graph, region.body.scopes, region.body.from_literals)
        for region in program.manual
        if region.op >= 0
    ]
