"""XLA on TPU keeps small, short-lived tensors in the chip's own memory.

What XLA does: a small tensor that is read soon stays on the chip and takes no HBM. The rest of the chip's memory holds tensors that XLA
    brings there ahead of their use.
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
"""Values fill one part in so many of the chip's memory, and the largest value one part in so many of that.

Measured on: compiled programs of 70 plans for v5e:2x4.
Checked by: benchmarks/fidelity_plans.py
"""

_SHORT = 200
"""The most ops for which a value on the chip lives.

Measured on: compiled programs of 70 plans for v5e:2x4.
Checked by: benchmarks/fidelity_plans.py
"""


class OnChip(NamedTuple):
    """The chip's part of short-lived values: `total_bytes` of them are not in memory, if none is larger than `largest_bytes`."""

    total_bytes: int
    largest_bytes: int

    @classmethod
    def of(cls, scratch_bytes: int) -> OnChip:
        """Returns the part that fits on a chip with `scratch_bytes` of memory."""
        total = scratch_bytes // _SCRATCH_PARTS
        return cls(total, total // _SCRATCH_PARTS)


def is_short(starts: IntArray, ends: IntArray, num_ops: int) -> BoolArray:
    """Returns for each life, from the op `starts` to the op `ends`, whether it is so short that its value may be on the chip."""
    return (ends - starts <= _SHORT) & ((starts > 0) | (ends < num_ops - 1))
