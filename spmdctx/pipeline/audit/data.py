"""Holds the figures of a pipeline's audit, and the verdict that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdctx.audit.data import AuditData, AuditRow
from spmdctx.pipeline.programs.transfers import Moved
from spmdctx.wording.reports import Report


class ProgramAudit(NamedTuple):
    """One compiled program beside its plan.

    Attributes:
        name: of the program, such as `forward0`.
        stage: on whose devices it runs; of those of all stages, the first.
        planned_runs: how often the schedule runs it in a step.
        runs: how often it was run.
        report: its collectives and its memory, for one run.
        misplaced: operands and results that it wants in another sharding than planned.
    """

    name: str
    stage: int
    planned_runs: int
    runs: int
    report: AuditData
    misplaced: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Returns whether the program is what the plan says, and runs as often; memory is shown, not judged."""
        return self.report.ok and not self.misplaced and self.runs == self.planned_runs


class PipelineAuditRow(NamedTuple):
    """The collectives of one program, of one kind over the same axes; `collective` counts one of its runs."""

    stage: int
    program: str
    runs: int
    collective: AuditRow


class TransferRow(NamedTuple):
    """What crosses between two stages in a step: planned, and done."""

    what: Moved
    source: int
    target: int
    planned_count: int
    planned_bytes: int
    done_count: int
    done_bytes: int

    @property
    def ok(self) -> bool:
        """Returns whether exactly what is planned was done."""
        return (self.planned_count, self.planned_bytes) == (self.done_count, self.done_bytes)


class EdgeRow(NamedTuple):
    """A program that divides the batch of a chunk, joins what a stage has made, or takes layers from those that it keeps.

    It has no plan, and is to communicate nothing.
    """

    program: str
    num_collectives: int


class StageRow(NamedTuple):
    """A stage: micro-batches in flight, and the bytes of one device at the peak.

    `compiled_bytes` is what lies there beside each program, with what the compiler says that the program adds; None if it says nothing.
    """

    stage: int
    planned_in_flight: int
    in_flight: int
    planned_bytes: int
    compiled_bytes: int | None


@dataclass(frozen=True, slots=True)
class PipelineAuditData(Report):
    """The figures of a pipeline's audit.

    Attributes:
        programs: each compiled program beside its plan, by stage.
        transfers: what crosses between stages.
        stages: micro-batches in flight and memory.
        edges: the programs right before and after a chunk's tasks.
        notes: what was not counted.
    """

    programs: tuple[ProgramAudit, ...]
    transfers: tuple[TransferRow, ...]
    stages: tuple[StageRow, ...]
    edges: tuple[EdgeRow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[PipelineAuditRow, ...]:
        """The collectives of all programs."""
        return tuple(PipelineAuditRow(one.stage, one.name, one.planned_runs, row) for one in self.programs for row in one.report.rows)

    @property
    def ok(self) -> bool:
        """Returns whether all programs, transfers and counts in flight are what the plan says; memory is shown, not judged."""
        return not self.faults

    @property
    def faults(self) -> tuple[str, ...]:
        """What differs, one sentence for each program, transfer and stage."""
        found = [f"{one.name} on stage {one.stage} differs from its plan." for one in self.programs if not one.ok]
        found += [
            f"{row.what} from stage {row.source} to {row.target}: {row.planned_count} planned, {row.done_count} done."
            for row in self.transfers
            if not row.ok
        ]
        found += [
            f"stage {row.stage} has {row.in_flight} micro-batches in flight, and not {row.planned_in_flight}."
            for row in self.stages
            if row.in_flight != row.planned_in_flight
        ]
        found += [f"{row.program} has {row.num_collectives} collectives, and is to have none." for row in self.edges if row.num_collectives]
        return tuple(found)

    kind = "pipeline_audit"

    def _figures(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "programs": [{**one._asdict(), "ok": one.ok} for one in self.programs],
            "rows": self.rows,
            "transfers": self.transfers,
            "stages": self.stages,
            "edges": self.edges,
            "faults": self.faults,
            "notes": self.notes,
        }
