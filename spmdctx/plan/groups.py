"""Joins rows that say the same thing: tensors of identical layers, collectives of one kind, collectives of one cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from spmdctx.ir.collective import MOVES, Cause, Collective
from spmdctx.ir.graph import Role
from spmdctx.ir.sharding import AxisNames
from spmdctx.plan.data import PlannedTensor

MAX_NAMES = 6

_NUMBER = re.compile(r"\d+")

T = TypeVar("T")


class TensorGroup(NamedTuple):
    """Tensors of equal shape, dtype, role and sharding whose paths differ in numbers only; `pattern` stands for all paths."""

    pattern: str
    tensors: tuple[PlannedTensor, ...]

    @property
    def first(self) -> PlannedTensor:
        """The first of the tensors, which differ in their paths only."""
        return self.tensors[0]


@dataclass(frozen=True, slots=True)
class CommunicationGroup:
    """Collectives of one kind over the same set of axes (and, where `cause` is not empty, of one cause), over a whole step."""

    kind: str
    axes: AxisNames
    cause: str
    source: str
    count: int
    payload_bytes: int
    time_s: float


def group_tensors(tensors: Iterable[PlannedTensor]) -> tuple[TensorGroup, ...]:
    """Groups by role, in the order of their first tensors: layers as `*`, names that are split alike as `{q,k,v}`."""
    layers = list(_gather(tensors, lambda tensor: (_mask(tensor), *tensor[1:])).values())
    shared = Counter(_mask(rows[0]) for rows in layers)
    groups = [TensorGroup(_pattern([row.path for row in rows], shared[_mask(rows[0])] == 1), tuple(rows)) for rows in layers]
    depth = max((group.pattern.count("/") for group in groups), default=0)
    for position in range(depth, -1, -1):
        groups = _join_names(groups, position)
    order = list(Role)
    return tuple(sorted(groups, key=lambda group: order.index(group.first.role)))


def _mask(tensor: PlannedTensor) -> str:
    return _NUMBER.sub("#", tensor.path)


def _join_names(groups: Sequence[TensorGroup], position: int) -> list[TensorGroup]:
    """Joins groups whose patterns differ only in the segment at `position`."""

    def around(group: TensorGroup) -> Hashable:
        parts = group.pattern.split("/")
        return (tuple(parts[:position]), tuple(parts[position + 1 :]), len(parts) > position or group.pattern, *group.first[1:])

    return [_joined_names(members, position) if len(members) > 1 else members[0] for members in _gather(groups, around).values()]


def _joined_names(groups: Sequence[TensorGroup], position: int) -> TensorGroup:
    parts = groups[0].pattern.split("/")
    names = [group.pattern.split("/")[position] for group in groups]
    shown = names if len(names) <= MAX_NAMES else [*names[: MAX_NAMES - 1], f"+{len(names) - MAX_NAMES + 1}"]
    parts[position] = "{" + ",".join(shown) + "}"
    return TensorGroup("/".join(parts), tuple(tensor for group in groups for tensor in group.tensors))


def by_kind(collectives: Iterable[Collective]) -> tuple[CommunicationGroup, ...]:
    """Returns one row per kind and axes, the most expensive first."""
    groups = _gather(collectives, lambda row: (row.kind, frozenset(row.axes)))
    return _ranked(_joined(rows, "", "") for rows in groups.values())


def by_cause(collectives: Iterable[Collective]) -> tuple[CommunicationGroup, ...]:
    """Returns one row per kind, axes, cause and source line, the most expensive first; layers count as one cause."""
    groups = _gather(collectives, lambda row: (row.kind, frozenset(row.axes), _of_layers(row.cause), _in_layers(row.source)))
    return _ranked(_joined(rows, _of_layers(rows[0].cause), _in_layers(rows[0].source)) for rows in groups.values())


def _gather(rows: Iterable[T], key: Callable[[T], Hashable]) -> dict[Hashable, list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _ranked(groups: Iterable[CommunicationGroup]) -> tuple[CommunicationGroup, ...]:
    return tuple(sorted(groups, key=lambda group: -group.time_s))


def _joined(rows: Sequence[Collective], cause: str, source: str) -> CommunicationGroup:
    return CommunicationGroup(
        rows[0].kind,
        rows[0].axes,
        cause,
        source,
        sum(row.repeats for row in rows),
        sum(row.payload_bytes * row.repeats for row in rows),
        sum(row.time_s * row.repeats for row in rows),
    )


def _of_layers(cause: Cause) -> Cause:
    """Returns the cause with `*` for the numbers that are whole segments of its path, such as layers."""
    return cause.along(re.sub(r"(?<=/)\d+(?=/)", "*", cause.gaps["path"])) if cause.form in MOVES else cause


def _in_layers(source: str) -> str:
    """Returns the place with `*` for the numbers of modules around the innermost, such as `layers_3/mlp`."""
    place, _, scope = source.partition(" in ")
    return f"{place} in {re.sub(r'(?<=_)[0-9]+(?=/)', '*', scope)}" if scope else source


def _pattern(paths: Sequence[str], complete: bool) -> str:
    """Returns a pattern such as `layers/*/w`, or `layers/0-2,5/w` if other groups hold the rest."""
    columns = list(zip(*(_NUMBER.findall(path) for path in paths), strict=True))
    parts = _NUMBER.split(paths[0])
    text = parts[0]
    for numbers, rest in zip(columns, parts[1:], strict=True):
        distinct = list(dict.fromkeys(numbers))
        text += (distinct[0] if len(distinct) == 1 else "*" if complete else _ranges(distinct)) + rest
    return text


def _ranges(numbers: Sequence[str]) -> str:
    ordered = sorted(map(int, numbers))
    spans: list[list[int]] = []
    for number in ordered:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
