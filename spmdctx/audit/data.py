"""Holds the figures of an audit: its rows, its totals, and the verdict that follows from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from spmdctx.audit.collectives import CompiledCollective
from spmdctx.ir.collective import Collective
from spmdctx.ir.sharding import AxisNames
from spmdctx.wording.reports import Report

MIN_FOUND_SHARE = 0.95
MAX_UNPLANNED_SHARE = 0.05
MAX_PEAK_RATIO = 1.25
EXCUSED_BYTES = 1 << 20
"""A peak that is larger than planned by less is as planned: programs of this size are constants and padding for the most part."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """The collectives of one kind over the same axes: executions and bytes in a step, planned, found and compiled.

    `compiled_bytes` are those of the compiled collectives that realise planned ones, whatever their kind; `ways` says how. `unplanned_*`
    count what the plan does not know of.
    """

    kind: str
    axes: AxisNames
    planned_count: int
    planned_bytes: int
    found_count: int
    found_bytes: int
    compiled_bytes: int
    unplanned_count: int
    unplanned_bytes: int
    ways: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The bytes on one device: the plan's estimate, and what the compiler reserved.

    `peak_bytes` is the sum, with buffers that arguments and results share counted once. It is not judged where the plan is for the
    compiler of another machine. `safe_bytes` is the safe end of the estimate; 0 where there is none, so that the limit above holds.
    """

    planned_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    is_judged: bool = True
    safe_bytes: int = 0

    @property
    def limit_bytes(self) -> float:
        """The peak up to which the compiled program is as planned."""
        return self.safe_bytes or MAX_PEAK_RATIO * self.planned_bytes

    @property
    def ratio(self) -> float | None:
        """The compiled peak over the planned one; None if nothing is planned."""
        return self.peak_bytes / self.planned_bytes if self.planned_bytes else None

    @property
    def is_excused(self) -> bool:
        """Returns whether the peak is larger than the limit allows, by less than counts."""
        return self.limit_bytes < self.peak_bytes < self.planned_bytes + EXCUSED_BYTES

    @property
    def ok(self) -> bool:
        """Returns whether the compiled peak is at most the safe end of the plan's, or within the limits above where it has none."""
        return not self.is_judged or self.is_excused or self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class AuditData(Report):
    """The figures of an audit: planned against compiled, row by row, and what differs."""

    rows: tuple[AuditRow, ...]
    missing: tuple[Collective, ...]
    unplanned: tuple[CompiledCollective, ...]
    memory: MemoryUse | None
    notes: tuple[str, ...] = ()

    @property
    def planned_bytes(self) -> int:
        """The bytes that the plan communicates in a step, per device."""
        return sum(row.planned_bytes for row in self.rows)

    @property
    def found_bytes(self) -> int:
        """The planned bytes that were found in the compiled program."""
        return sum(row.found_bytes for row in self.rows)

    @property
    def unplanned_bytes(self) -> int:
        """The compiled bytes that the plan does not know of."""
        return sum(row.unplanned_bytes for row in self.rows)

    @property
    def compiled_bytes(self) -> int:
        """All bytes that the compiled program communicates in a step, per device."""
        return sum(row.compiled_bytes + row.unplanned_bytes for row in self.rows)

    @property
    def found_share(self) -> float:
        """The share of the planned bytes that was found; 1 if nothing was planned."""
        return self.found_bytes / self.planned_bytes if self.planned_bytes else 1.0

    @property
    def unplanned_share(self) -> float:
        """The share of the compiled bytes that the plan does not know of; 0 if nothing is communicated."""
        return self.unplanned_bytes / self.compiled_bytes if self.compiled_bytes else 0.0

    @property
    def ok(self) -> bool:
        """Returns whether the compiled program communicates as the plan says, within the limits above; `memory.ok` judges its memory."""
        return self.found_share >= MIN_FOUND_SHARE and self.unplanned_share <= MAX_UNPLANNED_SHARE

    kind = "audit"

    def _figures(self) -> dict[str, Any]:
        names = (
            "ok",
            "planned_bytes",
            "found_bytes",
            "compiled_bytes",
            "unplanned_bytes",
            "rows",
            "missing",
            "unplanned",
            "memory",
            "notes",
        )
        figures = {name: getattr(self, name) for name in names}
        if self.memory is not None:
            figures["memory"] = {**asdict(self.memory), "ratio": self.memory.ratio, "ok": self.memory.ok}
        return figures
