"""The sharding rule of an op: its dimensions in factors, and the kind of each factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    def without_empty(self, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], *, blocks: bool) -> OpRule:
        """Returns the rule of an op with operands and results of these shapes, some perhaps without elements; those take no part.

        XLA makes them whole on every device, whatever their sharding says (jax 0.10.2), so nothing may split them.

        Args:
            operands: the shape of each operand.
            results: the shape of each result.
            blocks: whether their factors are not split in other tensors either, as an op needs that works on blocks of all operands.
        """
        if not any(0 in shape for shape in (*operands, *results)):
            return self
        empty: set[int] = set()
        sides: list[tuple[tuple[DimFactors, ...], ...]] = []
        for side, shapes in ((self.operands, operands), (self.results, results)):
            sides.append(tuple([((),) * len(dims) if 0 in shape else dims for dims, shape in zip(side, shapes, strict=True)]))
            empty.update(factor for dims, shape in zip(side, shapes, strict=True) if 0 in shape for own in dims for factor in own)
        return replace(self, operands=sides[0], results=sides[1], blocked=self.blocked | empty if blocks else self.blocked)

    def without_reductions(self) -> OpRule:
        """Returns the rule with its reduced dimensions whole."""
        reduced = {factor for factor, kind in enumerate(self.kinds) if kind is FactorKind.REDUCTION}
        return replace(self, blocked=self.blocked | reduced) if reduced else self

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


def window_flops(rule: OpRule, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> int:
    """Returns the operations of a convolution of these shapes: for each element of the result all of a window, zeros included."""
    kernel = math.prod(operands[1])
    shared = (size for size, dim in zip(operands[1], rule.operands[1], strict=True) if dim and dim in rule.results[0])
    return 2 * math.prod(results[0]) * kernel // max(1, next(shared, 1))
