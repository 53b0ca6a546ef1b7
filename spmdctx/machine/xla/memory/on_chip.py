"""XLA on TPU keeps small, short-lived tensors in the chip's own memory.

What XLA does: a small tensor that is read soon stays on the chip and takes no HBM. The rest of the chip's memory holds tensors that XLA
    brings there ahead of their use. What fusions read and write there takes next to no time. On v5e more is left for tensors than on
    v5p and v6e: mostly 60 to 110 MiB near the peak.
Seen in: libtpu 0.0.42.1, v5e:2x4: of 48 plans without convolutions 37 are within 15 % of the compiled memory, 32 if only a third of the
    chip counts, and so are 21 of 24 stages, 18 before (benchmarks/RESULTS.md). For v5p and v6e a larger part makes plans worse. GPU and
    CPU have no such memory.
Switch: `Compiler.scratch_bytes`
Priced by: cost.memory.lives, search.problem.memory.stored, cost.roofline
Written or prevented by: nothing
Checked by: tests/cost/memory/test_lives.py, tests/search/problem/memory/test_rows.py, benchmarks/memory_fidelity.py
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from spmdctx.ir.arrays import BoolArray, IntArray

_FILLED = (1 / 3, 1 / 9)
_FILLED_ON = {"tpu-v5e": (5 / 6, 1 / 3)}
"""The share of the chip's memory that values fill, and the share that the largest value may have, by device.

Measured on: compiled programs of 48 plans and 24 stages for v5e:2x4, 40 plans for v6e:2x4, 40 plans and 62 stages for v5p.
Checked by: benchmarks/memory_intervals.py
"""

_SHORT = 200
"""The most ops for which a value on the chip lives.

Measured on: compiled programs of 70 plans for v5e:2x4.
Checked by: benchmarks/memory_intervals.py
"""


class OnChip(NamedTuple):
    """The chip's part of short-lived values: `total_bytes` of them are not in memory, if none is larger than `largest_bytes`."""

    total_bytes: int
    largest_bytes: int

    @classmethod
    def of(cls, scratch_bytes: int, device: str) -> OnChip:
        """Returns the part that fits on a chip with `scratch_bytes` of memory, of a device by a topology's name for it."""
        return cls(*(int(share * scratch_bytes) for share in _FILLED_ON.get(device.removesuffix("-measured"), _FILLED)))


NO_CHIP = OnChip(0, 0)


def is_short(starts: IntArray, ends: IntArray, num_ops: int) -> BoolArray:
    """Returns for each life, from the op `starts` to the op `ends`, whether it is so short that its value may be on the chip."""
    return (ends - starts <= _SHORT) & ((starts > 0) | (ends < num_ops - 1))


class ChipShare(NamedTuple):
    """How much of what fusions read and write is on the chip: `most` of the smallest tensors, and less of larger ones.

    None is of tensors of `limit_bytes`.
    """

    most: float
    limit_bytes: float

    def moved(self, size: float) -> float:
        """Returns the bytes of a tensor of `size` bytes that come from memory or go there."""
        return size if size >= self.limit_bytes else size * (1.0 - self.most * (1.0 - size / self.limit_bytes))


_CHIP_SHARE = (0.5, 1 / 3)
_CHIP_SHARE_ON = {"tpu-v5e": (0.9, 7 / 6), "tpu-v6e": (0.8, 7 / 6)}
"""`ChipShare.most`, and `ChipShare.limit_bytes` as a share of the chip's memory that values may have, by device.

On the chip are read 90, 60, 35 and 12 % of tensors of 16 to 32, 32 to 64, 64 to 90 and 90 to 128 MiB on v5e, 74, 53, 33 and 0 % on v6e;
of 4 to 8, 8 to 16 and 16 to 32 MiB on v5p 9, 29 and 4 %.

Measured on: compiled programs in data parallelism of decoders, mixtures, ViT, DiT, T5 and evoformer: v5e:2x4, v6e:2x4, v5p:2x2x2.
Checked by: benchmarks/fidelity_plans.py
"""


@lru_cache
def held(scratch_bytes: int, device: str) -> ChipShare:
    """Returns what a chip with `scratch_bytes` of memory holds, of a device by a topology's name for it."""
    most, share = _CHIP_SHARE_ON.get(device.removesuffix("-measured"), _CHIP_SHARE)
    return ChipShare(most, share * scratch_bytes)
