"""The partitioner computes something else where a convolution with groups is split.

What XLA does: it takes a convolution whose kernel has one position for a matrix product, and then counts the groups of the whole
    convolution against one device's features: numbers are wrong, or a kernel with too few groups reads beyond its operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdctx.ir.rule import OpRule


def groups_of(params: Mapping[str, Any]) -> int:
    """Returns the number of groups of a convolution with these parameters, 1 if it has none."""
    return max(params["feature_group_count"], params["batch_group_count"])


def group_factor(rule: OpRule, params: Mapping[str, Any]) -> int:
    """Returns the factor of a convolution's groups: the major one of the kernel's output features."""
    return rule.operands[1][params["dimension_numbers"].rhs_spec[0]][0]
