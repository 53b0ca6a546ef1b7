"""TPU's compiler makes three real products of a complex one before it is split, and reduces each of them.

What XLA does: a complex product is computed from three real ones, of which the real and the imaginary part share one. Where the contraction
    is split, all three are reduced: half as many bytes again as the complex result has.
Seen in: libtpu 0.0.42, v5e:2x4: gradients of Fourier layers, 6 MiB of reductions for the 4 MiB of the plan. On GPU such a result is reduced
    as what it is.
Switch: none: TPU
Priced by: nothing
Written or prevented by: lowering.rewrite.local_ops runs such a product per block on TPU, and reduces the complex result.
Checked by: tests/machine/xla/partitioner/test_complex_products.py
"""

from __future__ import annotations


def is_complex_product(primitive: str, dtype: str) -> bool:
    """Returns whether a primitive whose result has a type multiplies complex matrices."""
    return primitive == "dot_general" and dtype.startswith("complex")
