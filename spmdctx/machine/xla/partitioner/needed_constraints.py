"""The partitioner may split a result that has no constraint as another reader's constraint suggests.

What XLA does: Shardy propagates constraints through ops to results that have none. But a constraint also keeps XLA from fusing or merging
    the ops on its sides, so results that can only be split as planned get none.
Seen in: libtpu 0.0.42: attention scores with a constraint are written once more. How much that costs: not measured.
Switch: none: all backends
Priced by: nothing
Written or prevented by: lowering.rewrite.values notes which values need one, and lowering.rewrite.rewriter writes it.
Checked by: tests/machine/xla/partitioner/test_needed_constraints.py
"""

from __future__ import annotations

from collections.abc import Container

from spmdctx.ir.graph import LITERAL, Op
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import project
from spmdctx.ir.rule import FactorKind
from spmdctx.ir.sharding import Assignment
from spmdctx.rules.elementwise import BINARY, MANY, UNARY

_HANDING_ON = frozenset(
    {
        *(*UNARY, *BINARY, *MANY),
        *("dot_general", "transpose", "reshape", "broadcast_in_dim", "slice", "concatenate", "pad", "reduce_max", "reduce_sum"),
    }
)
"""Ops through which the partitioner hands on how their operands are split."""


class NeededConstraints:
    """The ops of an assignment that need a constraint; `moved` holds the values that some reader takes in another sharding."""

    def __init__(self, assignment: Assignment, mesh: LogicalMesh, moved: Container[int]) -> None:
        self._assignment, self._moved = assignment, moved
        self._axes = frozenset(name for name, size in mesh.axes if size > 1)

    def __contains__(self, op: Op) -> bool:
        """Returns whether an op needs one: all do but plain element-wise ops, and those that can only be split as planned."""
        rule = op.rule
        if self._is_implied(op):
            return False
        if any(kind is not FactorKind.PASS_THROUGH for kind in rule.kinds) or rule.blocked:
            return True
        if len({dims for dims in (*rule.operands, *rule.results) if dims}) > 1:
            return True
        return not self._takes_as_stored(op) or all(value == LITERAL for value in op.operands)

    def _takes_as_stored(self, op: Op) -> bool:
        axes, stored = self._assignment.ops[op.id].axes, self._assignment.values
        pairs = zip(op.operands, op.rule.operands, strict=True)
        return all(value == LITERAL or stored[value] == project(dims, axes) for value, dims in pairs)

    def _is_implied(self, op: Op) -> bool:
        """Returns whether an op's one result can only be split as planned, for every reader.

        It is split over all axes, and each split is handed on by an operand or made by a broadcast.
        """
        if op.primitive not in _HANDING_ON or len(op.results) != 1 or op.results[0] in self._moved:
            return False
        axes, (dims,) = self._assignment.ops[op.id].axes, op.rule.results
        split = [factor for factors in dims for factor in factors if axes[factor]]
        handed = {factor for own in op.rule.operands for factors in own for factor in factors}
        return (
            (op.primitive == "broadcast_in_dim" or handed.issuperset(split))
            and self._axes.issubset(name for factor in split for name in axes[factor])
            and self._takes_as_stored(op)
        )
