"""Plans a captured step: builds its graph, prepares and runs the search, prices the assignment and assembles the plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import jax

from spmdctx.cost.evaluate import evaluate
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.directives import Directives, asks_for_groups, with_copies
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.plan.data import PlannedGradient, Timing
from spmdctx.plan.plan import Plan
from spmdctx.plan.rows import LazyRows
from spmdctx.search.dynamic.certificate import Certificate, lower_bound_s
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.shortfall import over_budget
from spmdctx.search.problem.orbits import Precedents
from spmdctx.search.select import Shared, search
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.modes import prepare
from spmdctx.step.planning.about import about_of
from spmdctx.step.planning.assemble import Decided, assembled, certified, cost_of, plain_gradients, reshards_of
from spmdctx.step.planning.bills import priced, written_collectives
from spmdctx.step.planning.log import log_plan, log_planning
from spmdctx.step.planning.notes import group_notes, left_whole, no_buckets_note, plan_notes, together, unbucketed_note, undivided_batch
from spmdctx.step.planning.other_values import Decision, other_values
from spmdctx.step.planning.request import request_of, search_mode, search_options, step_of
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.collector import no_garbage_collection
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording.phases import line
from spmdctx.wording.user_warnings import warn_user


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


def plan_program(
    captured: Captured,
    settings: Settings,
    shared: Shared | None = None,
    *,
    is_rough: bool = False,
    precedents: Precedents | None = None,
    given: Assignment | None = None,
    begun: Shared | None = None,
) -> Planned:
    """Plans a captured step; with `shared`, briefly, as one of several plans; if `is_rough`, only to tell how plans compare.

    With `precedents`, searches of a large program start from plans of others like it. Splits that are `given` are kept. What no budget
    changes is taken from `begun`, and left there. The budget of a part of a pipeline is no user's: a large part takes little time, and what
    the search does not count may exceed it.

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
        options = replace(search_options(settings), is_brief=shared is not None, is_rough=is_rough, shared=shared or begun)
        options = replace(options, is_a_room=captured.is_part, precedents=precedents, given=given)
        # What one process of several finds until it is interrupted is not what the others find.
        options = replace(options, is_interruptible=is_main and not jax.distributed.is_initialized())
        if is_main:
            log_planning(captured, settings, len(step.graph.ops))
        with line(f"Planning {captured.name}") if is_main else nullcontext():
            setup, assignment, certificate = search(step, request, options)
        assigned = Assigned(step, assignment, setup.mesh, settings.topology)
        bill, directives = priced(program, assigned, settings.context, written_collectives(program, setup.parts))
        budget = None if captured.is_part else settings.memory_bytes
        if budget is not None and bill.safe_bytes > budget and search_mode(settings):
            raise over_budget(step, bill, budget, setup.mesh.num_devices, settings.topology)
        undivided = undivided_batch(program, request, setup.mesh, assignment)
        setup.notes += undivided
        notes = plan_notes(program, captured, setup, settings, assignment, bill)
        gradients, has_regions = directives.gradients, bool(program.region_ops)
        grouped = asks_for_groups(settings.context, setup.mesh, has_regions=has_regions)
        if grouped and has_regions:
            notes = (*notes, *group_notes(program, settings, setup, bill, directives.groups))
        without = _without_buckets(program, settings, setup.mesh, assignment, directives, is_part=captured.is_part)
        if without:
            notes = (*notes, without)
        if shared is None and not is_rough:
            notes = (*notes, *other_values(Decision(program, captured, settings, setup, assigned, bill, directives)))
        timing = Timing(trace_s=captured.trace_s, search_s=time.perf_counter() - start)
        plan = assembled(program, captured, settings, Decided(setup, assignment, bill), notes, timing)
        named = [PlannedGradient(one.path, bucket) for one, bucket in zip(gradients.ordered, gradients.buckets, strict=True)]
        own = [PlannedGradient(*one) for one in captured.gradients]
        plan = replace(plan, gradients=(*own, *named) if own or grouped else plain_gradients(program, setup))
        if certificate is not None:
            plan = certified(plan, certificate)
        whole = _left_whole(plan, captured, settings)
        plan = replace(plan, notes=(*plan.notes, *whole))
        if is_main:
            log_plan(captured.name, plan)
    return Planned(plan, program, assignment, setup.mesh, directives, (*_joined(together(undivided)), *whole))


def priced_here(plan: Plan, program: Program, captured: Captured, settings: Settings) -> Planned:
    """Returns a plan with its price for a captured step and a machine, which may not be those that it was made for.

    What a search warns of is said of such a plan too.
    """
    request = request_of(program, captured, settings)
    parts = prepare(program.graph, request).parts if program.manual else {}
    assigned = Assigned(step_of(program, captured), plan.assignment, plan.logical_mesh, settings.topology)
    bill, directives = priced(program, assigned, settings.context, written_collectives(program, parts))
    reshards = LazyRows(lambda: reshards_of(program.graph, bill.moves))
    here = replace(plan, cost=cost_of(bill), collectives=tuple(bill.collectives), reshards=reshards)
    here = replace(here, memory_profile=bill.memory_profile, early=bill.early)
    here = replace(here, about=about_of(program, captured, settings))
    _without_buckets(program, settings, plan.logical_mesh, plan.assignment, directives, is_part=captured.is_part)
    undivided = undivided_batch(program, request, plan.logical_mesh, plan.assignment)
    said = (*_joined(undivided), *_left_whole(here, captured, settings))
    return Planned(here, program, plan.assignment, plan.logical_mesh, directives, said)


def _left_whole(plan: Plan, captured: Captured, settings: Settings) -> list[str]:
    """Returns a warning of state that was to be split and is not; programs of a pipeline say nothing of the whole state."""
    return [] if captured.is_part or plan.logical_mesh.num_devices == 1 else left_whole(plan.inputs, settings.context)


def _joined(sentences: Sequence[str]) -> tuple[str, ...]:
    """Returns some sentences as one warning, or no warning."""
    return (" ".join(sentences),) if sentences else ()


def _without_buckets(
    program: Program, settings: Settings, mesh: LogicalMesh, assignment: Assignment, directives: Directives, *, is_part: bool
) -> str:
    """Returns which buckets of gradients have no effect, after a warning that says so, or an empty string if all have one.

    Of a part of a pipeline, only what holds for that part: others may reduce what it does not.
    """
    gradients = directives.gradients
    without = "" if is_part else no_buckets_note(program, settings, mesh, gradients.buckets)
    if not without and settings.topology.compiler.keeps_barriers:
        without = unbucketed_note(program, assignment, gradients.ordered, gradients.buckets, directives.loop_sums)
    if without:
        warn_user(without)
    return without


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
