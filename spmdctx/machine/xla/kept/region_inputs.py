"""XLA on GPU writes what a recomputed region reads: a barrier stands before the region.

What XLA does: JAX puts an optimization barrier around the operands of a region of `jax.checkpoint` that is differentiated, cotangents too.
    Nothing is fused across it. So a cotangent that is the sum of two values is one value in memory, not two that the region adds up.
Seen in: CUDA plugin 0.10.2 for H100: stages of recomputed residual blocks in bfloat16, in which the sum of a layer's cotangents was
    planned as its two parts, alive to the end of the next region (benchmarks/RESULTS.md). On TPU: not measured.
Switch: none: a property of compilers that follows from other switches
Priced by: trace.build.compiled marks such values as being in memory.
Written or prevented by: nothing
Checked by: tests/machine/xla/kept/test_region_inputs.py
"""

from __future__ import annotations

import numpy as np

from spmdctx.ir.analysis.columns import Columns
from spmdctx.ir.primitives import CARRYING, ENTERING, LEAVING


def region_inputs(columns: Columns) -> list[int]:
    """Returns the values that ops of a region read and that ops outside of it make; loops take what they read by ops of their own."""
    at_border = columns.which(frozenset((*ENTERING, *LEAVING, *CARRYING)).__contains__)
    scopes, makers = columns.scopes, columns.maker_of[columns.read]
    inside = (makers >= 0) & (scopes[columns.readers] != _TOP) & (scopes[makers] != scopes[columns.readers])
    inside &= ~at_border[columns.readers] & ~at_border[makers]
    found: list[int] = np.unique(columns.read[inside]).tolist()
    return found


_TOP = 0
"""The scope of the step itself."""
