"""Audits a pipelined step: its compiled programs, what it moves, what is in flight, and its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from spmdctx.audit import AuditReport, audit_program
from spmdctx.audit.collectives import parse_collectives
from spmdctx.audit.data import AuditData
from spmdctx.ir.collective import Way
from spmdctx.lowering.compile import as_held
from spmdctx.pipeline.audit.data import EdgeRow, PipelineAuditData, ProgramAudit, StageRow, TransferRow
from spmdctx.pipeline.audit.render import report_html, report_text
from spmdctx.pipeline.capture.around import SPREAD
from spmdctx.pipeline.data import PipelineData, StagePlan
from spmdctx.pipeline.programs.transfers import Moved, Route
from spmdctx.pipeline.run.tape import Counts
from spmdctx.pipeline.stages.plans import Planned
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.trace.build.program import Program
from spmdctx.trace.specs import named_sharding

NOT_RUN = "No call has run: runs, transfers and micro-batches in flight are those that a call would count."
UNPLANNED = "What the step computes before its loss has no plan: {programs}."


@dataclass(frozen=True, slots=True)
class PipelineAudit(PipelineAuditData):
    """The comparison of a pipelined step with its plan.

    `ok` means that each compiled program agrees with its plan as `spmdctx.audit.AuditReport` says, has its operands and results where
    the plan has them, and ran as often as scheduled. All transfers are as planned, by count and bytes, and so are the micro-batches in
    flight.
    """

    def __str__(self) -> str:
        return report_text(self)

    def _repr_html_(self) -> str:
        return report_html(self)


class Built(NamedTuple):
    """What an audit looks at.

    Attributes:
        compiled: the compiled programs.
        meshes: of each stage.
        union: the mesh of all stages.
        counts: of the last call, or of one that would run.
        has_run: whether they are of a call.
    """

    compiled: Mapping[str, jax.stages.Compiled]
    meshes: Sequence[jax.sharding.Mesh]
    union: jax.sharding.Mesh
    counts: Counts
    has_run: bool


WaysOf = Callable[[Program], Sequence[Way]]
"""Gives the ways in which XLA may write the collectives of a program."""

_Audited = tuple[AuditReport, tuple[str, ...]]
"""The report of a program, and what it has misplaced."""


def audit_pipeline(pipeline: PlannedPipeline, plan: PipelineData, built: Built, ways_of: WaysOf) -> PipelineAudit:
    """Compares a pipelined step with its plan."""
    programs = tuple(_programs(pipeline, plan, built, ways_of))
    reports = {one.name: one.report for one in programs}
    stages = tuple(
        StageRow(number, stage.in_flight, built.counts.in_flight_of_stage[number], stage.memory_bytes, _compiled_peak(stage, reports))
        for number, stage in enumerate(plan.stages)
    )
    notes = [] if built.has_run else [NOT_RUN]
    before = [name for name in built.compiled if name.startswith("before")]
    notes += [UNPLANNED.format(programs=", ".join(before))] if before else []
    edges = [
        EdgeRow(name, len(parse_collectives(compiled.as_text() or "", plan.logical_mesh)))
        for name, compiled in built.compiled.items()
        if name.startswith(("begin", "end", "layers"))
    ]
    return PipelineAudit(programs, tuple(_transfers(pipeline, plan, built)), stages, tuple(edges), tuple(notes))


def _programs(pipeline: PlannedPipeline, plan: PipelineData, built: Built, ways_of: WaysOf) -> Iterator[ProgramAudit]:
    scheduled = Counter((task.kind, task.chunk) for tasks in pipeline.schedule.stages for task in tasks)
    for number, stage in enumerate(plan.stages):
        for chunk in stage.chunks:
            for kind, task in pipeline.planned[chunk].tasks.items():
                report, misplaced = _program(task.planned, built.compiled[task.name], built.meshes[number], ways_of)
                runs = built.counts.runs[kind, chunk]
                yield ProgramAudit(task.name, number, scheduled[kind, chunk], runs, report, misplaced)
        for task in (pipeline.reductions[chunk] for chunk in stage.chunks if chunk in pipeline.reductions):
            report, misplaced = _program(task.planned, built.compiled[task.name], built.meshes[number], ways_of)
            yield ProgramAudit(task.name, number, 1, built.counts.after[task.name], report, misplaced)
        for one in (one for programs in pipeline.rounds for one in programs if max(one.program.stage, 0) == number):
            mesh = built.union if one.program.stage == SPREAD else built.meshes[number]
            report, misplaced = _program(one.planned, built.compiled[one.name], mesh, ways_of)
            yield ProgramAudit(one.name, number, 1, built.counts.after[one.name], report, misplaced)


def _program(planned: Planned, compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, ways_of: WaysOf) -> _Audited:
    report = audit_program(planned.plan, compiled, ways_of(planned.program))
    return report, tuple(_misplaced(planned, compiled, mesh))


def _misplaced(planned: Planned, compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> Iterator[str]:
    """Gives operands and results that lie elsewhere in the compiled program than in the plan; it takes no operand that it does not read."""
    plan, graph = planned.plan, planned.program.graph
    operands, _ = compiled.input_shardings
    leaves = (
        *zip(plan.inputs, graph.inputs, operands, strict=True),
        *zip(plan.outputs, graph.outputs, compiled.output_shardings, strict=True),
    )
    for leaf, value, found in leaves:
        own = as_held(value, leaf.sharding, planned.directives)
        if found is not None and not found.is_equivalent_to(named_sharding(mesh, own), len(own)):
            yield leaf.path


def _compiled_peak(stage: StagePlan, reports: Mapping[str, AuditData]) -> int | None:
    """Returns the peak of a stage by what the compiler says of its programs."""
    found = [
        live + report.memory.peak_bytes - report.memory.argument_bytes
        for name, live in stage.live_bytes.items()
        if (report := reports[name]).memory is not None
    ]
    return max(found, default=None) if len(found) == len(stage.live_bytes) else None


def _transfers(pipeline: PlannedPipeline, plan: PipelineData, built: Built) -> Iterator[TransferRow]:
    """Gives a row for each route that is planned or was taken."""
    planned = {Route(one.what, one.source, one.target): (one.count, one.bytes) for one in plan.transfers}
    done = dict(built.counts.around)
    for (source, target), count in built.counts.moves.items():
        what = Moved.ACTIVATION if source < target else Moved.COTANGENT
        route = Route(what, pipeline.stage_of_chunk(source), pipeline.stage_of_chunk(target))
        if route.source != route.target:
            before = done.get(route, (0, 0))
            done[route] = (before[0] + count, before[1] + built.counts.bytes[source, target])
    for route in dict.fromkeys((*planned, *done)):
        yield TransferRow(*route, *planned.get(route, (0, 0)), *done.get(route, (0, 0)))
