"""The sharding rule of an op: its dimensions in factors, and the kind of each factor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DimFactors = tuple[int, ...]
"""Factors that make up one dimension, major first; empty where the dimension takes no part (size 1, or broadcast)."""


class FactorKind(StrEnum):
    """The meaning of a split of one factor of an op's iteration space: Shardy's four kinds."""

    PASS_THROUGH = "pass_through"
    REDUCTION = "reduction"
    NEED_REPLICATION = "need_replication"
    PERMUTATION = "permutation"


@dataclass(frozen=True, slots=True)
class OpRule:
    """The dimensions of an op's operands and results that belong together.

    `operands[i][d]` and `results[i][d]` list the factors of dimension `d`, major first. `sizes` and `kinds` have one entry
    per factor. A `blocked` factor keeps dimensions related, but is never split (the touched dimension of a slice, say).
    `combiner` names the operation that combines partial results of a reduction factor. `reason` says why nothing can be
    split, if that is so.
    """

    operands: tuple[tuple[DimFactors, ...], ...]
    results: tuple[tuple[DimFactors, ...], ...]
    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    blocked: frozenset[int] = frozenset()
    combiner: str = "add"
    reason: str = ""

    @property
    def splittable(self) -> tuple[bool, ...]:
        """One flag per factor: True where mesh axes may split it."""
        return tuple(
            size > 1 and index not in self.blocked and kind in (FactorKind.PASS_THROUGH, FactorKind.REDUCTION)
            for index, (size, kind) in enumerate(zip(self.sizes, self.kinds, strict=True))
        )

    def __str__(self) -> str:
        names = [factor_name(index) for index in range(len(self.sizes))]
        sides = [_side_text(side, names) for side in (self.operands, self.results)]
        sizes = ", ".join(f"{name}={size}" for name, size in zip(names, self.sizes, strict=True))
        text = f"{sides[0]}->{sides[1]} {{{sizes}}}"
        for kind in (FactorKind.REDUCTION, FactorKind.NEED_REPLICATION, FactorKind.PERMUTATION):
            members = [name for name, own in zip(names, self.kinds, strict=True) if own is kind]
            if members:
                text += f" {kind.value}={{{', '.join(members)}}}"
        if self.blocked:
            text += f" blocked_propagation={{{', '.join(names[index] for index in sorted(self.blocked))}}}"
        return text


def factor_name(index: int) -> str:
    """Returns the name that Shardy gives a factor: i, j, k, ... z, then z_1, z_2, ..."""
    return chr(ord("i") + index) if index < 18 else f"z_{index - 17}"


def _side_text(side: tuple[tuple[DimFactors, ...], ...], names: list[str]) -> str:
    tensors = []
    for dims in side:
        parts = []
        for factors in dims:
            text = " ".join(names[index] for index in factors)
            parts.append(f"({text})" if len(factors) > 1 else text or "1")
        tensors.append(f"[{', '.join(parts)}]")
    return f"({', '.join(tensors)})"
