"""Shardings of tensors and ops over mesh axes, and the assignment of a whole graph."""

from __future__ import annotations

from dataclasses import dataclass, field

AxisNames = tuple[str, ...]
"""Mesh axes that split one dimension or factor, major first."""

TensorSharding = tuple[AxisNames, ...]
"""Axes per dimension; always as long as the tensor's rank."""


@dataclass(frozen=True, slots=True)
class OpSharding:
    """Axes per factor of the op's rule, major first."""

    axes: tuple[AxisNames, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a search decides: an OpSharding per op, the sharding each value is stored in, and the mode that found it."""

    ops: tuple[OpSharding, ...]
    values: tuple[TensorSharding, ...]
    mode: str
    notes: tuple[str, ...] = field(default=())
