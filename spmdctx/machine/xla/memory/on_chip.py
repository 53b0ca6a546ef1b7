"""XLA on TPU keeps small, short-lived tensors in the chip's own memory.

What XLA does: what is small and read soon stays on the chip and takes no HBM. The rest of the chip's memory holds what is brought there
    ahead of its use.
Seen in: libtpu 0.0.42, v5e:2x4: with it 31 plans come to a median of 0.98 of the compiled memory, and those of a 0.1 to 0.4 GiB Llama step
    to 0.93 to 1.09 (benchmarks/RESULTS.md). v5p and v6e: not measured. GPU and CPU have no such memory.
Switch: `Compiler.scratch_bytes`
Priced by: cost.memory.lives, search.problem.memory_rows
Written or prevented by: nothing
Checked by: tests/cost/memory/test_lives.py, tests/search/problem/test_memory_rows.py, benchmarks/memory_fidelity.py
"""

from __future__ import annotations

from typing import NamedTuple

from spmdctx.ir.arrays import BoolArray, IntArray

_SCRATCH_PARTS = 3
"""Values fill one part of so many of the chip's memory, and the largest one such a part of that.

Measured on: compiled programs of 70 plans for v5e:2x4.
Checked by: benchmarks/fidelity_plans.py
"""

_SHORT = 200
"""Ops that a value on the chip lives for at most.

Measured on: compiled programs of 70 plans for v5e:2x4.
Checked by: benchmarks/fidelity_plans.py
"""


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
