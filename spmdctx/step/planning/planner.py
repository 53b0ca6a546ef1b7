"""Plans a captured step: builds its graph, prepares and runs the search, prices the assignment and assembles the plan."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import jax

from spmdctx.context.state import AutoParallelContext
from spmdctx.cost.bill import Bill
from spmdctx.cost.bodies import Body, add_bodies
from spmdctx.cost.evaluate import evaluate
from spmdctx.cost.price import price
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.directives import Directives, asks_for_groups, directives_of, with_copies
from spmdctx.cost.step import bill_of
from spmdctx.errors import ContextWarning
from spmdctx.ir.collective import Collective
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, AxisNames
from spmdctx.plan.data import PlannedGradient, Timing
from spmdctx.plan.plan import Plan
from spmdctx.plan.rows import LazyRows
from spmdctx.search.dynamic.certificate import Certificate
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import lower_bound_s
from spmdctx.search.dynamic.shortfall import over_budget
from spmdctx.search.optimizer.refined_mesh import refined_axes
from spmdctx.search.select import Shared, search
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.modes import prepare
from spmdctx.step.planning.about import about_of
from spmdctx.step.planning.assemble import Decided, assembled, certified, cost_of, plain_gradients, reshards_of
from spmdctx.step.planning.log import log_plan, log_planning
from spmdctx.step.planning.notes import group_notes, no_buckets_note, plan_notes, unbucketed_note, undivided_batch
from spmdctx.step.planning.request import request_of, search_mode, search_options, step_of
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.collector import no_garbage_collection
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording.phases import line


@dataclass(frozen=True)
class Planned:
    """A plan, and what lowering needs beside it; `warnings` are said at the first call."""

    plan: Plan
    program: Program
    assignment: Assignment
    mesh: LogicalMesh
    priced: Directives
    warnings: tuple[str, ...] = ()

    @cached_property
    def directives(self) -> Directives:
        """Everything that the program says besides shardings; what no price depends on is found when the step is lowered."""
        program = self.program
        return with_copies(self.priced, program.graph, program.scopes, self.assignment) if self.mesh.num_devices > 1 else self.priced


def plan_program(captured: Captured, settings: Settings, shared: Shared | None = None, *, is_rough: bool = False) -> Planned:
    """Plans a captured step; with `shared`, briefly, as one of several plans; if `is_rough`, only to tell how plans compare.

    Raises:
        StrategyError: strategies, batch or constraints that do not fit the mesh.
        UnsupportedError: something that the mode does not support, or with `strict` a primitive without a rule.
    """
    start = time.perf_counter()
    is_main = shared is None and not (is_rough or captured.is_part)
    with no_garbage_collection():
        program = captured.built_for(settings.topology.compiler)
        request = request_of(program, captured, settings)
        step = step_of(program, captured)
        options = replace(search_options(settings), is_brief=shared is not None, is_rough=is_rough, shared=shared)
        # What one process of several finds until it is interrupted is not what the others find.
        options = replace(options, is_interruptible=is_main and not jax.distributed.is_initialized())
        if is_main:
            log_planning(captured, settings, len(step.graph.ops))
        with line(f"Planning {captured.name}") if is_main else nullcontext():
            setup, assignment, certificate = search(step, request, options)
        bill, directives = _priced(
            program, Assigned(step, assignment, setup.mesh, settings.topology), settings.context, _written(program, setup.parts)
        )
        if settings.memory_bytes is not None and bill.memory_bytes > settings.memory_bytes and search_mode(settings):
            raise over_budget(step, bill, settings.memory_bytes, setup.mesh.num_devices, settings.topology)
        undivided = undivided_batch(program, request, setup.mesh, assignment)
        setup.notes += undivided
        notes = plan_notes(program, captured, setup, settings, assignment, bill)
        gradients, has_regions = directives.gradients, bool(program.region_ops)
        grouped = asks_for_groups(settings.context, setup.mesh, has_regions=has_regions)
        if grouped and has_regions:
            notes = (*notes, *group_notes(program, settings, setup, bill, directives.groups))
        without = _without_buckets(program, settings, setup.mesh, assignment, directives)
        if without:
            notes = (*notes, without)
        timing = Timing(trace_s=captured.trace_s, search_s=time.perf_counter() - start)
        plan = assembled(program, captured, settings, Decided(setup, assignment, bill), notes, timing)
        named = [PlannedGradient(one.path, bucket) for one, bucket in zip(gradients.ordered, gradients.buckets, strict=True)]
        own = [PlannedGradient(*one) for one in captured.gradients]
        plan = replace(plan, gradients=(*own, *named) if own or grouped else plain_gradients(program, setup))
        if certificate is not None:
            plan = certified(plan, certificate)
        if is_main:
            log_plan(captured.name, plan)
    return Planned(plan, program, assignment, setup.mesh, directives, _joined(undivided))


def priced_here(plan: Plan, program: Program, captured: Captured, settings: Settings) -> Planned:
    """Returns a plan with its price for a captured step and a machine, which may not be those that it was made for.

    What a search warns of is said of such a plan too.
    """
    request = request_of(program, captured, settings)
    parts = prepare(program.graph, request).parts if program.manual else {}
    assigned = Assigned(step_of(program, captured), plan.assignment, plan.logical_mesh, settings.topology)
    bill, directives = _priced(program, assigned, settings.context, _written(program, parts))
    reshards = LazyRows(lambda: reshards_of(program.graph, bill.moves))
    priced = replace(plan, cost=cost_of(bill), collectives=tuple(bill.collectives), reshards=reshards)
    priced = replace(priced, memory_profile=bill.memory_profile, early=bill.early)
    priced = replace(priced, about=about_of(program, captured, settings))
    _without_buckets(program, settings, plan.logical_mesh, plan.assignment, directives)
    undivided = undivided_batch(program, request, plan.logical_mesh, plan.assignment)
    return Planned(priced, program, plan.assignment, plan.logical_mesh, directives, _joined(undivided))


def _joined(sentences: Sequence[str]) -> tuple[str, ...]:
    """Returns some sentences as one warning, or no warning."""
    return (" ".join(sentences),) if sentences else ()


def _without_buckets(program: Program, settings: Settings, mesh: LogicalMesh, assignment: Assignment, directives: Directives) -> str:
    """Returns which buckets of gradients have no effect, after a warning that says so, or an empty string if all have one."""
    gradients = directives.gradients
    without = no_buckets_note(program, settings, mesh, gradients.buckets) or unbucketed_note(
        program, assignment, gradients.ordered, gradients.buckets, directives.loop_sums
    )
    if without:
        warnings.warn(without, ContextWarning, stacklevel=3)
    return without


def _written(program: Program, parts: Mapping[str, AxisNames]) -> list[Collective]:
    """Returns the collectives that the user wrote in the program, over axes of the plan's mesh."""
    return [replace(row, axes=refined_axes(row.axes, parts)) for region in program.manual for row in region.collectives]


def _priced(program: Program, assigned: Assigned, context: AutoParallelContext, written: Sequence[Collective]) -> tuple[Bill, Directives]:
    """Returns the bill of an assignment, with the collectives `written` in the program, and the plan's directives."""
    step, assignment, mesh, topology = assigned.step, assigned.assignment, assigned.mesh, assigned.topology
    directives = directives_of(assigned, context, has_regions=bool(program.region_ops))
    if written or directives.buckets or directives.loop_sums.totals:
        bill = price(step, assignment, mesh, topology, directives, written)
    else:
        # A search may have asked for it already.
        bill = bill_of(step, assignment, mesh, topology, directives)
    add_bodies(bill, step.graph, _bodies(program), assignment, mesh, topology)
    return bill, replace(directives, waits=bill.early)


def certify(plan: Plan, captured: Captured, settings: Settings) -> Plan:
    """Adds to a plan of auto_parallel the lower bound that dynamic programming proves."""
    with no_garbage_collection():
        program = captured.built_for(settings.topology.compiler)
        options = DynamicOptions(limits=AlgoLimits.of(settings.context.algo), max_axes=settings.max_mesh_axes)
        request = request_of(program, captured, settings)
        step, mesh, machine = step_of(program, captured), plan.logical_mesh, settings.topology
        bound, joined = lower_bound_s(step, request, machine, options, mesh)
        if bound is None:
            return replace(plan, notes=(*plan.notes, "No lower bound was searched: the mesh has too many axes."))
        counted = evaluate(step.graph, step.scopes, step.from_literals, plan.assignment, mesh, machine).total_s
    if joined:
        # The plan itself may use them apart.
        bound = min(bound, counted)
        note = f"The lower bound holds for this plan, and for plans that use axes of the mesh only together: {'; '.join(joined)}."
        plan = replace(plan, notes=(*plan.notes, note))
    return certified(plan, Certificate(bound, counted))


def _bodies(program: Program) -> list[Body]:
    """Returns the bodies of the program's shard_maps."""
    return [
        Body(region.op, region.repeats, region.body.graph, region.body.scopes, region.body.from_literals)
        for region in program.manual
        if region.op >= 0
    ]
