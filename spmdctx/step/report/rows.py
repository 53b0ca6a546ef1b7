"""Puts the measured time of compiled instructions beside the planned time of what they were made of: source lines and collectives."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from spmdctx.audit.collectives import KINDS
from spmdctx.audit.groups import read_span
from spmdctx.audit.hlo import Instruction, Module
from spmdctx.cost.roofline import compute_time_s
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.topology import Topology
from spmdctx.step.planning.planner import Planned
from spmdctx.step.report.trace import Event, Spent
from spmdctx.trace.build.program import ManualRegion
from spmdctx.trace.build.shard_maps import LOSS_SCOPE
from spmdctx.wording import place_text

_CONTAINERS = frozenset({"while", "conditional", "call", "async-start"})
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class RowKind(StrEnum):
    """What a row of a profile is."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    OTHER = "other"
    """What no row of the plan stands for."""


@dataclass(frozen=True)
class ProfileRow:
    """One row of a profile, for one step and the mean of the devices.

    Attributes:
        what: a source line and the pass in which it ran, a kind of collective and its axes, or why there is neither.
        kind: what the row is.
        measured_s: device seconds; those of all rows add up to the time in which a device was busy.
        behind_s: more seconds in which it ran while something else counted, as a collective behind compute.
        planned_s: the plan's, None where the plan has no such row.
        count: executions of its ops on one device.
    """

    what: str
    kind: RowKind
    measured_s: float
    behind_s: float
    planned_s: float | None
    count: float

    @property
    def ratio(self) -> float | None:
        """The planned seconds over the measured ones, those behind other ops among them for collectives."""
        measured = self.measured_s + (self.behind_s if self.kind is RowKind.COLLECTIVE else 0.0)
        return None if self.planned_s is None or not measured else self.planned_s / measured


_Key = tuple[RowKind, str]


class Named:
    """The instructions of a step's program, and the rows to which they belong."""

    def __init__(self, module: Module, name: str, mesh: LogicalMesh) -> None:
        self._module, self._name, self._mesh = module, name, mesh
        self._instructions = {one.name: one for own in module.computations.values() for one in own.instructions.values()}
        self._known: dict[str, _Key] = {}

    def rank(self, event: Event) -> int:
        """Returns the right of an event to time that it shares: compute goes before collectives, these before loops around ops."""
        instruction = self._instructions.get(event.op)
        if instruction is None:
            return 2
        return 0 if instruction.opcode in _CONTAINERS else 1 if _kind(instruction) else 2

    def row(self, module: str, op: str) -> _Key:
        """Returns the row of an op of a program."""
        if not op:
            return RowKind.OTHER, "what the backend gives no name of an op"
        if module and module != self._name:
            return RowKind.OTHER, f"other programs ({module})"
        if op not in self._known:
            instruction = self._instructions.get(op)
            self._known[op] = (RowKind.OTHER, "ops that the program's text does not have") if instruction is None else self._of(instruction)
        return self._known[op]

    def _of(self, instruction: Instruction) -> _Key:
        kind = _kind(instruction)
        if kind:
            return RowKind.COLLECTIVE, _collective(kind, read_span(instruction.attributes, self._mesh).axes)
        for one in (instruction, *self._inside(instruction)):
            place = self._module.source(one, of_users=True)
            if place:
                found = _OP_NAME.search(one.attributes)
                return RowKind.COMPUTE, _compute(place, found[1] if found else "")
        return RowKind.OTHER, f"{instruction.opcode} of the compiler's own, without a source line"

    def _inside(self, instruction: Instruction) -> Iterable[Instruction]:
        """Returns the instructions of a fusion, its result first."""
        for name in (*instruction.callees("calls"), *instruction.callees("to_apply")):
            computation = self._module.computations.get(name)
            if computation is not None:
                yield from reversed(list(computation.instructions.values()))


def _kind(instruction: Instruction) -> str | None:
    opcode = instruction.opcode.removesuffix("-start").removesuffix("-done")
    return KINDS.get(opcode)


def _collective(kind: str, axes: Iterable[str]) -> str:
    return f"{kind} over {'+'.join(sorted(axes)) or 'one device'}"


def _compute(source: str, name: str) -> str:
    run = "backward" if "transpose(" in name else "recomputed" if "rematted_computation" in name else ""
    return source.partition(" ")[0] + (f", {run}" if run else "")


def planned_rows(planned: Planned, topology: Topology) -> tuple[dict[_Key, float], dict[_Key, str]]:
    """Returns the planned seconds of each row, and how rows of source lines read, with the function that holds the line."""
    plan, program = planned.plan, planned.program
    rows: dict[_Key, float] = defaultdict(float)
    names: dict[_Key, str] = {}

    def add(graph: Any, choices: Any, mesh: LogicalMesh, times: int) -> None:
        for op, origin in zip(graph.ops, graph.origins, strict=True):
            axes = ((),) * len(op.rule.sizes) if choices is None else choices[op.id].axes
            seconds = times * op.repeats * compute_time_s(graph, op, axes, mesh, topology)
            if seconds:
                source = origin.source.replace(f" in {LOSS_SCOPE})", ")").replace(f"{LOSS_SCOPE}/", "")
                key = (RowKind.COMPUTE, _compute(source, origin.name)) if source else (RowKind.OTHER, "ops without a source line")
                rows[key] += seconds
                if not source:
                    continue
                names.setdefault(key, place_text(source) + key[1].removeprefix(source.partition(" ")[0]))

    def add_bodies(regions: Iterable[ManualRegion], times: int) -> None:
        for region in regions:
            add(region.body.graph, None, LogicalMesh(()), times * region.repeats)
            add_bodies(region.body.manual, times * region.repeats)

    add(program.graph, planned.assignment.ops, planned.mesh, 1)
    add_bodies(program.manual, 1)
    rest = plan.cost.compute_s - sum(rows.values())
    if abs(rest) > 1e-3 * plan.cost.compute_s:
        rows[RowKind.OTHER, "values that are written to be moved, and what fusions spare"] += rest
    for row in plan.collectives:
        rows[RowKind.COLLECTIVE, _collective(row.kind, row.axes)] += row.time_s * row.repeats
    return dict(rows), names


def joined(
    measured: Mapping[tuple[str, str], Spent], named: Named, planned: Mapping[_Key, float], names: Mapping[_Key, str], runs: int
) -> tuple[ProfileRow, ...]:
    """Returns the rows of a profile, the longest first.

    Args:
        measured: seconds of ops on all devices, by program and name.
        named: the program.
        planned: seconds of rows.
        names: how they read.
        runs: steps times devices.
    """
    own: dict[_Key, list[float]] = {}
    for (module, op), one in measured.items():
        sums = own.setdefault(named.row(module, op), [0.0, 0.0, 0.0])
        for place, figure in enumerate((one.own_s, one.behind_s, one.runs)):
            sums[place] += figure / runs
    rows = []
    for key in dict.fromkeys((*own, *planned)):
        seconds, behind, count = own.get(key, (0.0, 0.0, 0.0))
        rows.append(ProfileRow(names.get(key, key[1]), key[0], seconds, behind, planned.get(key), count))
    return tuple(sorted(rows, key=lambda row: (-row.measured_s, -(row.planned_s or 0.0))))
