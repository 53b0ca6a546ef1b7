"""XLA on TPU copies what one program keeps for another, unless it may choose the order of dimensions in memory.

What XLA does: a program's results lie in the order of their dimensions, and so do its operands. Scores of attention and what is kept of
    products are computed in other orders, so that the forward pass of a stage copies them, and the backward pass copies them back. A
    program that may choose the layout of what it keeps chooses the one in which it is computed, and the backward pass reads it so.
Seen in: libtpu 0.0.42.1, v5p, stages of two to three layers: copies of 492 and 396 MiB by the forward and the backward pass of grouped
    attention become 108 and 108, those of encoder layers 693 and 441 become 0 and 0; temporaries of the backward pass 566 -> 186 and
    379 -> 207 MiB. Stages without attention stay as they are (benchmarks/RESULTS.md). On GPU and CPU: not measured.
Switch: none: the platform tells
Priced by: nothing: a plan counts no such copies.
Written or prevented by: pipeline.run.compiled lets the compiler choose.
Checked by: tests/pipeline/run/test_layouts.py
"""

from __future__ import annotations

LAYOUTS_ON = frozenset({"tpu"})
"""Platforms whose compiler chooses the layout of what a program keeps."""
