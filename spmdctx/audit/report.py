"""The audit report: compares a compiled program's collectives and memory with its plan, as text, page or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from spmdctx.audit.collectives import CompiledCollective, parse_collectives
from spmdctx.audit.groups import in_mesh_order
from spmdctx.audit.match import Comparison, compare
from spmdctx.audit.render import report_html, report_text
from spmdctx.ir.collective import Collective
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames

if TYPE_CHECKING:
    import jax

MIN_FOUND_SHARE = 0.95
MAX_UNPLANNED_SHARE = 0.05


class _Costs(Protocol):
    @property
    def memory_bytes(self) -> int: ...


class AuditedPlan(Protocol):
    """The parts of a plan that the audit reads."""

    @property
    def logical_mesh(self) -> LogicalMesh:
        """The mesh."""

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Predicted communication."""

    @property
    def cost(self) -> _Costs:
        """Predicted cost."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """All collectives of one kind over the same axes: executions and bytes in a step, planned, found, compiled.

    `compiled_bytes` is what realises the planned ones, whatever its kind; `ways` says how; `unplanned_*` is what the plan
    does not know of.
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
    """Bytes on one device: the plan's estimate, and the compiler's reservations.

    `peak_bytes` is the compiler's own figure. If it gives none, it is the sum with shared buffers counted once.
    """

    planned_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The comparison of a compiled program with its plan.

    `ok` means that at least 95 % of the planned bytes were found, each within 10 %, and at most 5 % of the compiled bytes are
    unplanned. `missing` and `unplanned` list the differences with source lines.
    """

    rows: tuple[AuditRow, ...]
    missing: tuple[Collective, ...]
    unplanned: tuple[CompiledCollective, ...]
    memory: MemoryUse | None
    notes: tuple[str, ...] = ()

    @property
    def planned_bytes(self) -> int:
        """Bytes the plan communicates in a step, per device."""
        return sum(row.planned_bytes for row in self.rows)

    @property
    def found_bytes(self) -> int:
        """The planned bytes that were found in the compiled program."""
        return sum(row.found_bytes for row in self.rows)

    @property
    def unplanned_bytes(self) -> int:
        """Compiled bytes that the plan does not know of."""
        return sum(row.unplanned_bytes for row in self.rows)

    @property
    def compiled_bytes(self) -> int:
        """All bytes that the compiled program communicates in a step, per device."""
        return sum(row.compiled_bytes + row.unplanned_bytes for row in self.rows)

    @property
    def found_share(self) -> float:
        """Share of the planned bytes that was found; 1 where nothing was planned."""
        return self.found_bytes / self.planned_bytes if self.planned_bytes else 1.0

    @property
    def unplanned_share(self) -> float:
        """Share of the compiled bytes that the plan does not know of; 0 where nothing is communicated."""
        return self.unplanned_bytes / self.compiled_bytes if self.compiled_bytes else 0.0

    @property
    def ok(self) -> bool:
        """True if the compiled program agrees with the plan within the limits above."""
        return self.found_share >= MIN_FOUND_SHARE and self.unplanned_share <= MAX_UNPLANNED_SHARE

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {
            "ok": self.ok,
            "planned_bytes": self.planned_bytes,
            "found_bytes": self.found_bytes,
            "compiled_bytes": self.compiled_bytes,
            "unplanned_bytes": self.unplanned_bytes,
            "rows": [asdict(row) for row in self.rows],
            "missing": [asdict(one) for one in self.missing],
            "unplanned": [asdict(one) for one in self.unplanned],
            "memory": asdict(self.memory) if self.memory else None,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Returns `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return report_text(self)

    def _repr_html_(self) -> str:
        return report_html(self)


def audit_program(plan: AuditedPlan, compiled: jax.stages.Compiled) -> AuditReport:
    """Compares a compiled program with the plan from which it was lowered."""
    return audit_text(plan, compiled.as_text() or "", _read_memory(compiled, plan.cost.memory_bytes))


def audit_text(plan: AuditedPlan, hlo_text: str, memory: MemoryUse | None = None) -> AuditReport:
    """Audits a program from its text alone."""
    compiled = parse_collectives(hlo_text, plan.logical_mesh)
    found = compare(plan.collectives, compiled, plan.logical_mesh)
    rows = _rows(plan.collectives, found, plan.logical_mesh)
    unknown = sum("unknown length" in one.note for one in compiled)
    notes = (f"{unknown} collectives run in loops whose length depends on data; one iteration is counted.",) if unknown else ()
    return AuditReport(rows, found.missing, found.unplanned, memory, notes)


def _read_memory(compiled: jax.stages.Compiled, planned_bytes: int) -> MemoryUse | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    sizes = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.alias_size_in_bytes, stats.temp_size_in_bytes)
    peak = getattr(stats, "peak_memory_in_bytes", 0) or sizes[0] + sizes[1] - sizes[2] + sizes[3]
    return MemoryUse(planned_bytes, *sizes, peak)


def _rows(planned: Iterable[Collective], found: Comparison, mesh: LogicalMesh) -> tuple[AuditRow, ...]:
    sums: dict[tuple[str, AxisNames], dict[str, int]] = {}
    ways: dict[tuple[str, AxisNames], dict[str, int]] = {}

    def add(kind: str, axes: AxisNames, **amounts: int) -> None:
        row = sums.setdefault((kind, axes), {})
        for name, amount in amounts.items():
            row[name] = row.get(name, 0) + amount

    for one in planned:
        axes = in_mesh_order(one.axes, mesh)
        if axes and one.payload_bytes:
            add(one.kind, axes, planned_count=one.repeats, planned_bytes=one.repeats * one.payload_bytes)
    for match in found.matches:
        key = (match.planned.kind, in_mesh_order(match.planned.axes, mesh))
        planned_bytes = match.count * match.planned.payload_bytes
        add(*key, found_count=match.count, found_bytes=planned_bytes, compiled_bytes=match.realised_bytes)
        own = ways.setdefault(key, {})
        own[match.way] = own.get(match.way, 0) + match.count
    for extra in found.unplanned:
        add(extra.kind, extra.axes, unplanned_count=extra.repeats, unplanned_bytes=extra.total_bytes)
    ordered = sorted(sums, key=lambda key: (-sums[key].get("planned_bytes", 0), -sums[key].get("unplanned_bytes", 0), key))
    return tuple(_row(*key, sums[key], tuple(sorted(ways.get(key, {}).items()))) for key in ordered)


def _row(kind: str, axes: AxisNames, sums: dict[str, int], ways: tuple[tuple[str, int], ...]) -> AuditRow:
    return AuditRow(
        kind,
        axes,
        planned_count=sums.get("planned_count", 0),
        planned_bytes=sums.get("planned_bytes", 0),
        found_count=sums.get("found_count", 0),
        found_bytes=sums.get("found_bytes", 0),
        compiled_bytes=sums.get("compiled_bytes", 0),
        unplanned_count=sums.get("unplanned_count", 0),
        unplanned_bytes=sums.get("unplanned_bytes", 0),
        ways=ways,
    )
