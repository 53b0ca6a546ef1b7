"""Assembles the plan from the assignment that the search found and its bill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from spmdctx.cost.bill import Bill, Moved
from spmdctx.ir.analysis.gradient_order import gradient_order
from spmdctx.ir.graph import LITERAL, Graph, Role
from spmdctx.ir.mesh import replicated
from spmdctx.ir.sharding import Assignment
from spmdctx.plan.data import Cost, OpTable, PlannedGradient, PlannedTensor, Reshard, Timing
from spmdctx.plan.plan import Plan
from spmdctx.plan.rows import LazyRows
from spmdctx.search.dynamic.certificate import Certificate, gap_of
from spmdctx.search.setup.request import Setup
from spmdctx.step.planning.about import about_of
from spmdctx.step.planning.request import search_mode
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings

_SEARCHED = ("dynamic_programming", "recursive_programming")


def certified(plan: Plan, certificate: Certificate) -> Plan:
    """Returns the plan with the bound that a certificate proves on its price."""
    bound_s, note = certificate.of_price(plan.cost.total_s)
    notes = (*plan.notes, note) if note else plan.notes
    return replace(plan, lower_bound_s=bound_s, gap=gap_of(plan.cost.total_s, bound_s), notes=notes)


def plain_gradients(program: Program, setup: Setup) -> Sequence[PlannedGradient]:
    """Returns the gradients of a plan without buckets."""
    return LazyRows(lambda: [PlannedGradient(one.path) for one in gradient_order(program.graph)]) if setup.mesh.num_devices > 1 else ()


class Decided(NamedTuple):
    """The decisions of a search for a step, and their bill."""

    setup: Setup
    assignment: Assignment
    bill: Bill


def assembled(program: Program, captured: Captured, settings: Settings, decided: Decided, notes: tuple[str, ...], timing: Timing) -> Plan:
    """Returns the plan, whose gradients have no buckets yet."""
    setup, assignment, bill = decided
    graph, context, moves = program.graph, settings.context, tuple(bill.moves)
    inputs = tuple(
        PlannedTensor(leaf.path, leaf.role, leaf.shape, leaf.dtype, assignment.values[value], _reason(setup, assignment, value))
        for leaf, value in zip(captured.inputs, graph.inputs, strict=True)
    )
    outputs = tuple(
        PlannedTensor(
            leaf.path,
            Role.INTERMEDIATE if leaf.carried_from is None else captured.inputs[leaf.carried_from].role,
            leaf.shape,
            leaf.dtype,
            assignment.values[value] if value != LITERAL else replicated(len(leaf.shape)),
        )
        for leaf, value in zip(captured.outputs, graph.outputs, strict=True)
    )
    return Plan(
        fingerprint=graph.fingerprint,
        mode=context.parallel_mode,
        search_mode=search_mode(settings),
        options=context.plan_options(),
        logical_mesh=setup.mesh,
        topology=settings.topology.device,
        inputs=inputs,
        outputs=outputs,
        op_table=OpTable.of(graph, assignment),
        memory_limit_bytes=settings.memory_bytes,
        assignment=assignment,
        reshards=LazyRows(lambda: reshards_of(graph, moves)),
        collectives=tuple(bill.collectives),
        cost=cost_of(bill),
        notes=notes,
        timing=timing,
        memory_profile=bill.memory_profile,
        early=bill.early,
        about=about_of(program, captured, settings),
    )


def cost_of(bill: Bill) -> Cost:
    """Returns the totals of a bill."""
    return Cost(bill.compute_s, bill.communication_s, bill.total_s, bill.memory_bytes, bill.hidden_communication_s)


def _reason(setup: Setup, assignment: Assignment, value: int) -> str:
    """Returns the reason for an input's sharding."""
    if setup.mesh.num_devices == 1:
        return "there is one device"
    known = setup.reasons.get(value)
    if known is not None and (value in setup.pins or value in setup.layerwise or setup.seeds.get(value) == assignment.values[value]):
        return known
    if assignment.mode in _SEARCHED:
        return "the cheapest that the search found"
    return "spread from what is pinned" if any(assignment.values[value]) else "nothing pinned reaches it"


def reshards_of(graph: Graph, moves: Sequence[Moved]) -> Iterator[Reshard]:
    """Gives the moves of a bill as the plan lists them."""
    for move in moves:
        origin = graph.origins[move.op]
        name = graph.values[move.value].path or f"value of {origin.name or graph.ops[move.op].primitive}"
        yield Reshard(name, move.source, move.target, graph.ops[move.op].primitive, origin.source, move.time_s)
