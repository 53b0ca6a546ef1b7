"""The audit report: compares a compiled program's collectives and memory with its plan, as text, page or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax

from spmdctx.audit.collectives import OPEN_LOOP, parse_collectives
from spmdctx.audit.data import AuditData, AuditRow, MemoryUse
from spmdctx.audit.groups import in_mesh_order
from spmdctx.audit.match import Comparison, compare
from spmdctx.audit.render import report_html, report_text
from spmdctx.ir.collective import Collective, Way
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames


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

    @property
    def safe_memory_bytes(self) -> int:
        """The safe end of the predicted peak; the likely one where nothing is known of it."""


@dataclass(frozen=True, slots=True)
class AuditReport(AuditData):
    """The comparison of a compiled program with its plan.

    `ok` means that at least 95 % of the planned bytes were found, each within 10 %, and at most 5 % of the compiled bytes are
    unplanned. `memory.ok` means that the compiled peak is at most the safe end of the planned one (1.25 of it where there is none),
    or less than 1 MiB above it; the text says that the program agrees with the plan where both hold. `missing` and `unplanned` list the
    differences with source lines.
    """

    def __str__(self) -> str:
        return report_text(self)

    def _repr_html_(self) -> str:
        return report_html(self)


def audit_program(plan: AuditedPlan, compiled: jax.stages.Compiled, ways: Sequence[Way], *, judges_memory: bool = True) -> AuditReport:
    """Compares a compiled program with its plan.

    Args:
        plan: the plan.
        compiled: the program.
        ways: those in which XLA may write planned collectives.
        judges_memory: whether the compiler is the one that the plan is for, so that the peaks are to be alike.
    """
    memory = _read_memory(compiled, plan.cost.memory_bytes)
    if memory is not None:
        safe = plan.safe_memory_bytes
        memory = replace(memory, is_judged=judges_memory, safe_bytes=safe if safe > memory.planned_bytes else 0)
    return audit_text(plan, compiled.as_text() or "", ways, memory)


def audit_text(plan: AuditedPlan, hlo_text: str, ways: Sequence[Way], memory: MemoryUse | None = None) -> AuditReport:
    """Audits a program from its text alone."""
    compiled = parse_collectives(hlo_text, plan.logical_mesh)
    found = compare(plan.collectives, compiled, plan.logical_mesh, ways)
    rows = _rows(plan.collectives, found, plan.logical_mesh)
    unknown = sum(OPEN_LOOP in one.note.parts for one in compiled)
    notes = (f"{unknown} collectives run in loops whose length depends on data; one iteration is counted.",) if unknown else ()
    return AuditReport(rows, found.missing, found.unplanned, memory, notes)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes that the compiler reserved on each device; 0 where it does not say."""
    memory = _read_memory(compiled, 0)
    return 0 if memory is None else memory.peak_bytes


def _read_memory(compiled: jax.stages.Compiled, planned_bytes: int) -> MemoryUse | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arguments, results, shared = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.alias_size_in_bytes
    temporaries = stats.temp_size_in_bytes
    # The compiler for TPU counts holes of the heap twice in temporaries, with what loops carry, and leaves them out of the peak. What
    # remains is exact without loops, and up to a sixth too large with them (benchmarks/RESULTS.md). The peak is of no use on CPU.
    if _platform(compiled) == "tpu":
        temporaries -= max(0, arguments + results - shared + temporaries - stats.peak_memory_in_bytes) // 2
    return MemoryUse(planned_bytes, arguments, results, shared, temporaries, arguments + results - shared + temporaries)


def _platform(compiled: jax.stages.Compiled) -> str:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((device.platform for sharding in shardings for device in sharding.device_set), "")


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
