"""Shardings of tensors and ops over mesh axes, and the assignment of a whole graph."""

from __future__ import annotations

from dataclasses import dataclass, field

AxisNames = tuple[str, ...]
"""Mesh axes that split one dimension or factor, major first."""

TensorSharding = tuple[AxisNames, ...]
"""The axes of each dimension; always as long as the tensor's rank."""


@dataclass(frozen=True, slots=True)
class OpSharding:
    """The axes that split each factor of the op's rule, major first."""

    axes: tuple[AxisNames, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The result of a search: an OpSharding per op, the sharding in which each value is stored, and the mode that found both."""

    ops: tuple[OpSharding, ...]
    values: tuple[TensorSharding, ...]
    mode: str
    notes: tuple[str, ...] = field(default=())
