"""XLA on TPU keeps small, short-lived tensors in the chip's own memory, not in HBM."""

from __future__ import annotations

from typing import NamedTuple

from spmdctx.ir.arrays import BoolArray, IntArray

_SCRATCH_PARTS = 3
"""What values fill of the chip's memory, and the largest one of that."""

_SHORT = 200
"""Ops that a value on the chip lives for at most."""


class OnChip(NamedTuple):
    """Of what lives shortly, `total_bytes` are on the chip and not in memory, if no piece is larger than `largest_bytes`."""

    total_bytes: int
    largest_bytes: int

    @classmethod
    def of(cls, scratch_bytes: int) -> OnChip:
        """Returns what fits on a chip with so much memory of its own."""
        total = scratch_bytes // _SCRATCH_PARTS
        return cls(total, total // _SCRATCH_PARTS)


def is_short(starts: IntArray, ends: IntArray, num_ops: int) -> BoolArray:
    """Tells which lives, from the op `starts` to the op `ends`, are so short that what they hold may be on the chip."""
    return (ends - starts <= _SHORT) & ((starts > 0) | (ends < num_ops - 1))
