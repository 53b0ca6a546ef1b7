"""Plans a captured step: builds its graph, prepares and runs the search, prices the assignment and assembles the plan."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from spmdctx.cost.bill import Bill
from spmdctx.cost.bodies import Body, add_bodies
from spmdctx.cost.evaluate import evaluate
from spmdctx.cost.price import price
from spmdctx.cost.region_groups import region_groups
from spmdctx.cost.step import Step, bill_of
from spmdctx.errors import ContextWarning
from spmdctx.ir.analysis.gradient_order import Gradient, gradient_order
from spmdctx.ir.analysis.loop_sums import Holds, holds_of, loop_sums
from spmdctx.ir.collective import Collective
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, AxisNames
from spmdctx.lowering.rewrite.directives import gradient_buckets, sum_buckets
from spmdctx.machine.topology import Topology
from spmdctx.plan.data import PlannedGradient, Timing
from spmdctx.plan.plan import Plan
from spmdctx.plan.rows import LateRows
from spmdctx.search.dynamic.certificate import Certificate
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import lower_bound_s
from spmdctx.search.dynamic.shortfall import over_budget
from spmdctx.search.optimizer.refined_mesh import refined_axes
from spmdctx.search.select import search
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.modes import prepare
from spmdctx.step.planning.assemble import _assemble, _certified, _cost, _gradients, _reshards
from spmdctx.step.planning.notes import _group_notes, _in_turns, _notes, _without_buckets
from spmdctx.step.planning.request import _request, _search_mode, _search_options, _step
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.collector import no_garbage_collection
from spmdctx.trace.scope.settings import Settings


@dataclass(frozen=True)
class Planned:
    """A plan together with what lowering needs."""

    plan: Plan
    program: Program
    assignment: Assignment
    mesh: LogicalMesh


def plan_program(captured: Captured, settings: Settings) -> Planned:
    """Plans a captured step.

    Raises:
        StrategyError: strategies, batch or constraints that do not fit the mesh.
        UnsupportedError: something that the mode does not support, or with `strict` a primitive without a rule.
    """
    start = time.perf_counter()
    with no_garbage_collection():
        program = build(captured.jaxpr, [Argument(leaf.path, leaf.role) for leaf in captured.inputs], captured.carried)
        request = _request(program, captured, settings)
        step = _step(program, captured)
        setup, assignment, certificate = search(step, request, _search_options(settings))
        grouped = _is_grouped(program, settings, setup.mesh)
        written = _written(program, setup.parts)
        gradients, buckets, by_sum, holds, bill = _priced(program, step, settings, assignment, setup.mesh, written)
        if settings.memory_bytes is not None and bill.memory_bytes > settings.memory_bytes and _search_mode(settings):
            raise over_budget(step, bill, settings.memory_bytes, setup.mesh.num_devices, settings.topology)
        notes = _notes(program, captured, setup, settings, assignment, bill)
        if grouped and program.region_ops:
            groups = region_groups(program.graph, assignment, setup.mesh, by_sum)
            notes = (*notes, *_group_notes(program, settings, setup, bill, groups))
        without = _without_buckets(program, settings, setup, buckets) or _in_turns(program, assignment, gradients, buckets, holds)
        if without:
            warnings.warn(without, ContextWarning, stacklevel=2)
            notes = (*notes, without)
        timing = Timing(trace_s=captured.trace_s, search_s=time.perf_counter() - start)
        plan = _assemble(program, captured, settings, setup, assignment, bill, notes, timing)
        named = [PlannedGradient(one.path, bucket) for one, bucket in zip(gradients, buckets, strict=True)]
        own = [PlannedGradient(*one) for one in captured.gradients]
        plan = replace(plan, gradients=(*own, *named) if own or grouped else _gradients(program, setup))
        if certificate is not None:
            plan = _certified(plan, certificate)
    return Planned(plan, program, assignment, setup.mesh)


def priced_here(plan: Plan, program: Program, captured: Captured, settings: Settings) -> Plan:
    """Returns a plan priced for a captured step and a machine, which may differ from those for which it was made."""
    parts = prepare(program.graph, _request(program, captured, settings)).parts if program.manual else {}
    step, written = _step(program, captured), _written(program, parts)
    bill = _priced(program, step, settings, plan.assignment, plan.logical_mesh, written).bill
    reshards = LateRows(lambda: _reshards(program.graph, bill.moves))
    priced = replace(plan, cost=_cost(bill), collectives=tuple(bill.collectives), reshards=reshards)
    return replace(priced, memory_profile=bill.memory_profile, early=bill.early)


def _written(program: Program, parts: Mapping[str, AxisNames]) -> list[Collective]:
    """Returns the collectives that the user wrote in the program, over axes of the plan's mesh."""
    return [replace(row, axes=refined_axes(row.axes, parts)) for region in program.manual for row in region.collectives]


class _Priced(NamedTuple):
    """The price of an assignment, with the sums that are reduced separately: gradients in buckets, and sums that loops hold."""

    gradients: Sequence[Gradient]
    buckets: Sequence[int | None]
    by_sum: Mapping[int, int]
    holds: Holds
    bill: Bill


def _priced(
    program: Program, step: Step, settings: Settings, assignment: Assignment, mesh: LogicalMesh, written: Sequence[Collective]
) -> _Priced:
    """Prices an assignment, with the collectives that are `written` in the program."""
    graph = program.graph
    gradients = gradient_order(graph) if _is_grouped(program, settings, mesh) else ()
    buckets = gradient_buckets(graph, settings.context, gradients)
    by_sum = sum_buckets(gradients, buckets)
    holds = holds_of(graph, loop_sums(graph, by_sum), assignment, mesh)
    bill = _bill(step, written, assignment, mesh, settings.topology, by_sum, holds)
    add_bodies(bill, graph, _bodies(program), assignment, mesh, settings.topology)
    return _Priced(gradients, buckets, by_sum, holds, bill)


def _is_grouped(program: Program, settings: Settings, mesh: LogicalMesh) -> bool:
    """Returns whether the user asked for gradients to be reduced in buckets."""
    return mesh.num_devices > 1 and (settings.context.fuses_by_index or bool(program.region_ops))


def _bill(
    step: Step,
    written: Sequence[Collective],
    assignment: Assignment,
    mesh: LogicalMesh,
    topology: Topology,
    by_sum: Mapping[int, int],
    holds: Holds,
) -> Bill:
    """Prices the plan; reuses the bill that a search already asked for if there is nothing to add."""
    if not (written or by_sum or holds.axes or holds.totals):
        return bill_of(step, assignment, mesh, topology)
    return price(step.graph, step.scopes, step.loose, written, assignment, mesh, topology, step.donated, by_sum, holds)


def certify(plan: Plan, captured: Captured, settings: Settings) -> Plan:
    """Adds to a plan of auto_parallel the lower bound that dynamic programming proves."""
    with no_garbage_collection():
        program = build(captured.jaxpr, [Argument(leaf.path, leaf.role) for leaf in captured.inputs], captured.carried)
        options = DynamicOptions(limits=AlgoLimits.of(settings.context.algo), max_axes=settings.max_mesh_axes)
        request = _request(program, captured, settings)
        step, mesh, machine = _step(program, captured), plan.logical_mesh, settings.topology
        bound = lower_bound_s(step, request, machine, options, mesh)
        counted = evaluate(step.graph, step.scopes, step.loose, plan.assignment, mesh, machine).total_s
    return _certified(plan, Certificate(bound, counted))


def _bodies(program: Program) -> list[Body]:
    """Returns the bodies of the program's shard_maps."""
    return [
        Body(region.op, region.repeats, region.body.graph, region.body.scopes, region.body.loose)
        for region in program.manual
        if region.op >= 0
    ]
