"""XLA on GPU makes the gradients of weights last: what only their products read stays in memory until then.

What XLA does: its scheduler visits the deepest operands first, so the whole chain of cotangents runs before any product that makes a
    gradient; to hide reductions, too, it keeps such products for the end. In a step that recomputes its layers, every layer's recomputed
    activations then live at once, as if nothing were recomputed. It runs nothing behind an optimization barrier before what is ahead of it.
Seen in: CUDA plugin 0.10.2 for 8 x H100: decoders of 6 and 8 recomputed layers take 1.2 to 1.6 times as much memory as with barriers
    behind the layers (benchmarks/RESULTS.md). TPU's scheduler has a limit of memory instead (`machine.xla.memory.scheduler_limit`).
Switch: none: `LATE_ON`
Priced by: cost.memory.lives counts as if gradients were made early.
Written or prevented by: lowering.rewrite.waiting.early_gradients
Checked by: tests/lowering/test_early_gradients.py
"""

LATE_ON = frozenset({"gpu"})
"""The backends that do so."""
