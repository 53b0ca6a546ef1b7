"""The partitioner computes something else where a convolution with groups is split.

What XLA does: it takes a convolution whose window has one position for a matrix product, and then hands each device the groups of the
    whole convolution: numbers are wrong as soon as groups are split, or the kernel of one device is read beyond its end. With larger
    windows this happens where a device holds one group and output features are split further. With batch groups, as in a kernel's
    gradient, it adds a split contraction up over devices that hold the same slice, and aborts on split output features. What it does
    right it gathers first, if groups have several features. Convolutions without groups, and splits of the batch alone, are right.
Seen in: jaxlib 0.10.2, plain `jax.jit` with such shardings of operands and results on eight CPU devices, meshes 2x4 and 2x2x2, against
    one device; 126 convolutions and gradients of convolutions. Wrong are 666 of 1,220 splits with feature groups and a window of one
    position, 50 of 964 with larger windows, 194 of 418 with batch groups, none of 2,028 without groups; 23 convolutions end the process.
    TPU and GPU programs pass the same partitioner.
Switch: none: all backends
Priced by: nothing
Written or prevented by: lowering.rewrite.local_ops runs such a convolution per block, with the groups that one device holds;
    lowering.rewrite.partial_terms does so where loops add up its results.
Checked by: tests/machine/xla/partitioner/test_grouped_convolutions.py, tests/rules/test_numbers.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdctx.ir.rule import OpRule


def groups_of(params: Mapping[str, Any]) -> int:
    """Returns the number of groups of a convolution with these parameters, 1 if it has none."""
    return int(max(params["feature_group_count"], params["batch_group_count"]))


def group_factor(rule: OpRule, params: Mapping[str, Any]) -> int:
    """Returns the factor of a convolution's groups: the major one of the kernel's output features."""
    features: int = params["dimension_numbers"].rhs_spec[0]
    return rule.operands[1][features][0]
