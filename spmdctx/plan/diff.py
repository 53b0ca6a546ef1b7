"""Compares two plans: their settings, costs, tensors, collectives and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from spmdctx.errors import message
from spmdctx.ir.graph import Role
from spmdctx.ir.sharding import AxisNames
from spmdctx.plan.data import PlanData, PlannedTensor
from spmdctx.plan.groups import TensorGroup, by_kind, group_tensors
from spmdctx.wording import TIMES, bytes_text, counted, mesh_text, seconds_text, split_text


@dataclass(frozen=True, slots=True)
class Change:
    """One named thing before and after, as text; empty where it is missing."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class CommunicationChange:
    """The collectives of a step of one kind over the same axes, in any order, before and after."""

    kind: str
    axes: AxisNames
    counts: tuple[int, int]
    payload_bytes: tuple[int, int]
    times_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class PlanDiffData:
    """The differences of two plans; false if there are none.

    Attributes:
        settings: program, mesh, modes, machine and options that differ.
        costs: predicted time and memory that differ, and bytes that one device stores of the arguments, by role.
        tensors: argument leaves whose shape or sharding differs, or that only one plan has.
        communication: collectives that differ.
        num_ops: number of ops that are split differently; None if the plans are for different programs.
        notes_added, notes_removed: notes that only the later plan has, and that only the earlier one has.
        same: whether the plans are equal in everything, ops and reshards included.
    """

    settings: tuple[Change, ...]
    costs: tuple[Change, ...]
    tensors: tuple[Change, ...]
    communication: tuple[CommunicationChange, ...]
    num_ops: int | None
    notes_added: tuple[str, ...]
    notes_removed: tuple[str, ...]
    same: bool

    def __bool__(self) -> bool:
        return not self.same


Difference = TypeVar("Difference", bound=PlanDiffData)


@runtime_checkable
class OtherPlan(Protocol):
    """A plan of another kind, which knows its changes from a plan."""

    def changes_from(self, before: PlanData) -> Any:
        """Returns the changes from a plan to this one."""


def diff_plans(before: PlanData, after: PlanData, kind: type[Difference]) -> Difference:
    """Compares two plans; returns an object of the class `kind`."""
    if not isinstance(after, PlanData):
        raise TypeError(message("A plan is compared with another plan.", got=repr(after), need="a Plan, of plan(...) or Plan.load(...)"))
    num_ops = None
    if before.fingerprint == after.fingerprint and len(before.op_table) == len(after.op_table):
        num_ops = sum(old != new for old, new in zip(before.op_table.choices, after.op_table.choices, strict=True))
    return kind(
        settings=tuple(_settings(before, after)),
        costs=tuple(_costs(before, after)),
        tensors=tuple(_tensors(before, after)),
        communication=tuple(_communication(before, after)),
        num_ops=num_ops,
        notes_added=tuple(note for note in after.notes if note not in before.notes),
        notes_removed=tuple(note for note in before.notes if note not in after.notes),
        same=before == after,
    )


def _settings(before: PlanData, after: PlanData) -> Iterator[Change]:
    pairs = [
        ("program", before.fingerprint[:12], after.fingerprint[:12]),
        ("mesh", mesh_text(before.logical_mesh), mesh_text(after.logical_mesh)),
        ("mode", before.mode, after.mode),
        ("search_mode", before.search_mode, after.search_mode),
        ("topology", before.topology, after.topology),
    ]
    old, new = dict(before.options), dict(after.options)
    for name in [*old, *(name for name in new if name not in old)]:
        pairs.append((name, repr(old[name]) if name in old else "", repr(new[name]) if name in new else ""))
    return (Change(*pair) for pair in dict.fromkeys(pairs) if pair[1] != pair[2])


def _costs(before: PlanData, after: PlanData) -> Iterator[Change]:
    """Gives the changes in time and memory of the step, then those in what one device stores of the arguments, by role.

    Changes that round to 0.0 % are left out.
    """
    for name in ("total_s", "compute_s", "communication_s", "hidden_communication_s", "memory_bytes"):
        unit = bytes_text if name == "memory_bytes" else seconds_text
        label = name.rsplit("_", 1)[0].replace("total", "step").replace("_", " ")
        yield from quantity_change(label, getattr(before.cost, name), getattr(after.cost, name), unit)
    stored = [_stored_bytes(plan) for plan in (before, after)]
    for role in Role:
        yield from quantity_change(f"stored: {role.value}", stored[0].get(role, 0), stored[1].get(role, 0), bytes_text)


def quantity_change(name: str, old: float, new: float, unit: Callable[[float], str]) -> Iterator[Change]:
    """Gives the change of a quantity, unless it rounds to 0.0 %; `unit` formats it."""
    percent = f"{100 * (new / old - 1):+.1f}" if old else ""
    if old != new and percent not in ("+0.0", "-0.0"):
        relative = f"  ({percent} %)" if percent else ""
        yield Change(name, unit(old), unit(new) + relative)


def _stored_bytes(plan: PlanData) -> dict[Role, int]:
    found: dict[Role, int] = {}
    for tensor in plan.inputs:
        found[tensor.role] = found.get(tensor.role, 0) + tensor.local_bytes(plan.logical_mesh)
    return found


def _tensors(before: PlanData, after: PlanData) -> Iterator[Change]:
    """Gives the changes of tensors, grouped by what they were and what they are, so that equal layers make one row."""
    new = {tensor.path: tensor for tensor in after.inputs}
    old = {tensor.path: tensor for tensor in before.inputs}
    pairs: dict[tuple[str, str], list[PlannedTensor]] = {}
    for path, tensor in {**new, **old}.items():
        texts = (_tensor_text(old.get(path), new.get(path)), _tensor_text(new.get(path), old.get(path)))
        if texts[0] != texts[1]:
            pairs.setdefault(texts, []).append(tensor)
    for (was, becomes), tensors in pairs.items():
        for group in group_tensors(tensors):
            yield Change(_group_name(group), was, becomes)


def _group_name(group: TensorGroup) -> str:
    return f"{group.pattern}  {TIMES}{len(group.tensors)}" if len(group.tensors) > 1 else group.pattern


def _tensor_text(tensor: PlannedTensor | None, other: PlannedTensor | None) -> str:
    if tensor is None:
        return ""
    text = split_text(tensor.sharding)
    if other is None or (tensor.shape, tensor.dtype) == (other.shape, other.dtype):
        return text
    return f"{tensor.dtype}{list(tensor.shape)} {text}"


def _communication(before: PlanData, after: PlanData) -> Iterator[CommunicationChange]:
    old = {(group.kind, frozenset(group.axes)): group for group in by_kind(before.collectives)}
    new = {(group.kind, frozenset(group.axes)): group for group in by_kind(after.collectives)}
    for key in {**old, **new}:
        was, becomes = old.get(key), new.get(key)
        counts = (was.count if was else 0, becomes.count if becomes else 0)
        payload = (was.payload_bytes if was else 0, becomes.payload_bytes if becomes else 0)
        times = (was.time_s if was else 0.0, becomes.time_s if becomes else 0.0)
        if (counts[0], payload[0]) != (counts[1], payload[1]):
            known = was or becomes
            yield CommunicationChange(key[0], known.axes if known else (), counts, payload, times)


def verdict(diff: PlanDiffData) -> str:
    """Returns the sentence to show if there is nothing to list; empty if there is."""
    if diff.same:
        return "The plans are equal."
    if any((diff.settings, diff.costs, diff.tensors, diff.communication, diff.num_ops, diff.notes_added, diff.notes_removed)):
        return ""
    return "The plans differ in details only: in intermediate values, in where things come from, or by less than 0.05 %."


def ops_text(num_ops: int) -> str:
    """Returns a sentence with the number of ops that are split differently."""
    return f"{counted(num_ops, 'op')} {'is' if num_ops == 1 else 'are'} split otherwise."
