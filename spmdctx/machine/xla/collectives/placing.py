"""XLA reduces in place, computes gathers beside products, and scatters gradients late.

What XLA does: it does an all_reduce in place, unless it fuses a gather with the product before it, which then has several results. It
    fuses a gather with a few products that run before its reader, but a gather of a gradient with none. A gradient waits for its
    reduce_scatter behind products that others need; why is not known.
Seen in: libtpu 0.0.42, v5e:2x4: 178 of 179 all_reduces are in place in 70 programs, and none of 75 whose product is fused with a gather.
    GPU and CPU: not measured.
Switch: `Compiler.gather_overlap` for gathers; for the rest none: all backends.
Priced by: cost.memory.copies
Written or prevented by: nothing
Checked by: tests/cost/memory/test_copies.py, benchmarks/fidelity_plans.py
"""

from __future__ import annotations

MOST_HIDING = 3
"""The most products with which XLA fuses a gather.

Measured on: compiled programs of 70 plans for v5e:2x4.
Checked by: benchmarks/fidelity_plans.py
"""

PRODUCTS_WAITED = 12
"""The number of products that others need, behind which a gradient waits for its reduce_scatter; chosen among 0, 3, 6 and 12.

Measured on: ZeRO-1 and ZeRO-3 of one decoder on v5e; it fits v5p too.
Checked by: benchmarks/memory_fidelity.py
"""
