"""Compiled peaks lie around the predicted ones: what XLA's allocator and scheduler add to temporaries, and how much is safe to allow for.

What XLA does: buffers of unlike sizes leave holes between them, ops run in another order than foreseen, copies are made that no rule
    knows. Arguments are as large as foreseen. Of the rest, small programs are foreseen less well than large ones.
Seen in: libtpu 0.0.42 for v5e, v5p and v6e, CUDA plugin 0.10.2 for H100 (benchmarks/RESULTS.md). CPU: not measured.
Switch: none: the name of the device tells
Priced by: cost.price.peak, search.problem.memory.rows
Written or prevented by: nothing
Checked by: tests/machine/xla/test_spread.py, benchmarks/memory_intervals.py
"""

from __future__ import annotations

import math
from typing import NamedTuple

_MIB = 2**20
_ROUNDING = 1e-9


class Spread(NamedTuple):
    """The bytes to allow for beside temporaries: a share of them, and another one of at most `most_bytes`."""

    share: float = 0.0
    small_share: float = 0.0
    most_bytes: int = 0

    def of(self, temporary_bytes: float) -> float:
        """Returns the bytes to allow for beside so many bytes of temporaries."""
        return self.share * temporary_bytes + min(self.small_share * temporary_bytes, self.most_bytes)

    def least_share(self, limit_bytes: float) -> float:
        """Returns the share of temporaries up to a limit that has to be allowed for at least; a trifle less, as sums are rounded."""
        return (1 - _ROUNDING) * self.of(limit_bytes) / limit_bytes if limit_bytes > 0 else 0.0


_TPU = Spread(0.15, 0.5, 256 * _MIB)
_GPU = Spread(0.15, 0.3, 128 * _MIB)
"""The bytes to allow for.

Measured on: plans of five models, among them random ones (benchmarks/memory_models.py: TUNING).
Checked by: benchmarks/memory_intervals.py
"""

_NONE = Spread()
_GPUS = ("h100", "h200", "a100")


def spread_on(device: str) -> Spread:
    """Returns what to allow for on a device, by a topology's name for it.

    It is nothing where nothing was measured: on CPU, and on machines that a user describes by a name of their own.
    """
    name = device.removesuffix("-measured")
    return _TPU if name.startswith("tpu-") else _GPU if name in _GPUS else _NONE


def safe_bytes(likely_bytes: int, argument_bytes: int, device: str) -> int:
    """Returns the peak that is safe to allow for, of which `argument_bytes` are certain."""
    return likely_bytes + math.ceil(spread_on(device).of(max(0, likely_bytes - argument_bytes)))
