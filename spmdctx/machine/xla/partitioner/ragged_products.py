"""The partitioner gathers a ragged dimension: each device then multiplies all rows.

What XLA does: it makes a kernel of a ragged product, and splits features of either operand, but neither rows nor groups. Rows that an
    assignment splits it gathers before the product, or the result behind it. A product that contracts the ragged dimension, as the
    gradient of the weights does, becomes one of matrices: every group multiplies all rows, those of others masked.
Seen in: jaxlib 0.10.2, libtpu 0.0.42: 4,096 rows and eight groups, a product, its two gradients, and splits of each dimension, compiled
    for eight v5e. On CPU JAX writes masks itself, which split like any others.
Switch: none: a property of compilers that follows from other switches
Priced by: rules.flops counts every group of a product that contracts the ragged dimension; cost.roofline counts masked rows
Written or prevented by: lowering.rewrite.local_ops runs such a product per block, with the rows of each group that one device holds;
    lowering.rewrite.partial_terms does so where loops add up its results.
Checked by: tests/machine/xla/partitioner/test_ragged_products.py, tests/rules/test_contraction.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spmdctx.ir.projection import project
from spmdctx.ir.rule import OpRule
from spmdctx.ir.sharding import AxisNames

RAGGED = "ragged_dot_general"


def ragged_dim(params: Mapping[str, Any]) -> int:
    """Returns the dimension of the left operand that is cut into groups."""
    dim: int = params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions[0]
    return dim


def ragged_axes(rule: OpRule, params: Mapping[str, Any], axes: tuple[AxisNames, ...]) -> AxisNames:
    """Returns the mesh axes that split the rows of a ragged product."""
    return project(rule.operands[0], axes)[ragged_dim(params)]


def groups_of(rule: OpRule) -> tuple[int, bool]:
    """Returns the number of groups of a ragged product, and whether it contracts the rows; one group where neither side has more."""
    left, right, made = ({factor for dims in side for factor in dims} for side in (*rule.operands[:2], rule.results[0]))
    groups = (right | made) & rule.blocked - left
    return math.prod(rule.sizes[factor] for factor in groups), bool(groups & made)
