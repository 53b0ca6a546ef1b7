"""The partitioner may split a result that has no constraint as another reader's constraint suggests.

What XLA does: Shardy propagates constraints through ops to results that have none. But a constraint also keeps XLA from fusing or merging
    the ops on its sides, so results that can only be split as planned get none. Where only constants, or a broadcast, would
    hand a split on, nothing says so: XLA leaves them whole, unless a reader takes the split from another operand. Shardy has no rule for
    erf, which hands on nothing, neither forth nor back.
Seen in: libtpu 0.0.42: attention scores with a constraint are written once more. How much that costs: not measured.
Switch: none: all backends
Priced by: nothing
Written or prevented by: lowering.rewrite.values notes which values need one, and lowering.rewrite.rewriter writes it.
Checked by: tests/machine/xla/partitioner/test_needed_constraints.py
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from spmdctx.ir.graph import LITERAL, Graph, Op, Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import project
from spmdctx.ir.rule import DimFactors, FactorKind
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.xla.partitioner.equal_values import turned_products
from spmdctx.rules.elementwise import BINARY, MANY, UNARY

_HANDING_ON = frozenset(
    {
        *(*UNARY, *BINARY, *MANY),
        *("dot_general", "transpose", "reshape", "broadcast_in_dim", "slice", "concatenate", "pad", "reduce_max", "reduce_sum"),
    }
)
"""Ops through which the partitioner hands on how their operands are split."""

_OPAQUE = frozenset({"erf"})
"""Element-wise ops through which the partitioner hands on nothing."""

_FAR = 20
"""Ops after which a chain of plain ops counts as split."""


class NeededConstraints:
    """The ops of an assignment that need a constraint.

    `from_literals` holds the values that depend on no input, `moved` those that some reader takes in another sharding.
    """

    def __init__(
        self, graph: Graph, from_literals: AbstractSet[int], assignment: Assignment, mesh: LogicalMesh, moved: Collection[int]
    ) -> None:
        self._graph, self._from_literals, self._assignment, self._moved = graph, from_literals, assignment, moved
        self._outputs, self._turned = frozenset(graph.outputs), turned_products(graph, assignment)
        self._axes = frozenset(name for name, size in mesh.axes if size > 1)

    def __contains__(self, op: Op) -> bool:
        """Returns whether an op needs one: all do but plain element-wise ops, and those that can only be split as planned."""
        if self._is_implied(op):
            return False
        if not _is_plain(op) or not self._takes_as_stored(op) or all(value == LITERAL for value in op.operands):
            return True
        return self._makes_split(op) and not self._is_split_elsewhere(op, range(len(self._graph.values[op.results[0]].shape)))

    def _makes_split(self, op: Op) -> bool:
        """Returns whether a plain op's result is split, and depends on an input, but no operand hands that on, as with random bits."""
        return (
            any(self._assignment.ops[op.id].axes)
            and not all(value in self._from_literals for value in op.results)
            and not any(op.rule.operands[place] for place in self._handing(op))
        )

    def _takes_as_stored(self, op: Op) -> bool:
        axes, stored = self._assignment.ops[op.id].axes, self._assignment.values
        pairs = zip(op.operands, op.rule.operands, strict=True)
        return all(value == LITERAL or stored[value] == project(dims, axes) for value, dims in pairs)

    def _is_implied(self, op: Op) -> bool:
        """Returns whether an op's one result can only be split as planned, for every reader.

        It is split over all axes, and each split is handed on by an operand, or made by a broadcast for readers that get it elsewhere.
        """
        if op.primitive not in _HANDING_ON or len(op.results) != 1 or op.results[0] in self._moved:
            return False
        axes, (dims,) = self._assignment.ops[op.id].axes, op.rule.results
        split = {factor for factors in dims for factor in factors if axes[factor]}
        new = split - self._handed(op)
        return (
            (not new or (op.primitive == "broadcast_in_dim" and self._is_split_elsewhere(op, _dims_of(new, dims))))
            and self._axes.issubset(name for factor in split for name in axes[factor])
            and self._takes_as_stored(op)
        )

    def _handing(self, op: Op) -> list[int]:
        """Returns the places of the operands that hand on how they are split."""
        if op.primitive in _OPAQUE:
            return []
        return [place for place, value in enumerate(op.operands) if value != LITERAL and not self._is_open(value)]

    def _is_open(self, value: int) -> bool:
        """Returns whether nothing says how a value is split; a turned product is constrained behind its transpose."""
        graph = self._graph
        if value in self._turned:
            return not self._is_implied(graph.ops[graph.producers[value]])
        return value in self._from_literals or graph.values[value].role is Role.CONSTANT

    def _handed(self, op: Op) -> set[int]:
        """Returns the factors that the operands hand on."""
        return {factor for place in self._handing(op) for factors in op.rule.operands[place] for factor in factors}

    def _is_split_elsewhere(self, op: Op, dims: Collection[int]) -> bool:
        """Returns whether all that read an op's result, through plain ops, get the split of `dims` from another operand or from outside."""
        waiting, seen = [op.results[0]], set[int]()
        while waiting:
            value = waiting.pop()
            # What is handed on to a result of the step does not reach other readers of a repeated scalar: Shardy makes that for each.
            is_given = value in self._outputs and not (value in op.results and self._repeats_one_element(op))
            for reader in self._graph.readers[value] if not is_given and value not in seen else ():
                if not _is_plain(reader) or reader.primitive in _OPAQUE or len(reader.results) != 1:
                    return False
                if not self._is_split_by(reader, dims, value):
                    waiting.append(reader.results[0])
            seen.add(value)
        return True

    def _repeats_one_element(self, op: Op) -> bool:
        if op.primitive != "broadcast_in_dim":
            return False
        return op.operands[0] == LITERAL or math.prod(self._graph.values[op.operands[0]].shape) == 1

    def _is_split_by(self, op: Op, dims: Collection[int], besides: int = LITERAL, depth: int = 0) -> bool:
        """Returns whether an operand of a plain op, other than one, is sure to be split along `dims`."""
        others = [op.operands[place] for place in self._handing(op) if op.rule.operands[place] and op.operands[place] != besides]
        return any(self._is_settled(value, dims, depth + 1) for value in others)

    def _is_settled(self, value: int, dims: Collection[int], depth: int) -> bool:
        maker = self._graph.producers.get(value)
        op = None if maker is None else self._graph.ops[maker]
        if op is None or depth > _FAR:
            return True
        if op.primitive == "broadcast_in_dim":
            axes, handed = self._assignment.ops[op.id].axes, self._handed(op)
            return all(factor in handed for dim in dims for factor in op.rule.results[0][dim] if axes[factor])
        return not _is_plain(op) or self._is_split_by(op, dims, depth=depth)


def _dims_of(factors: AbstractSet[int], dims: Sequence[DimFactors]) -> list[int]:
    """Returns the dimensions that hold some factors."""
    return [dim for dim, own in enumerate(dims) if not factors.isdisjoint(own)]


def _is_plain(op: Op) -> bool:
    """Returns whether an op is split in all operands and results alike."""
    rule = op.rule
    if any(kind is not FactorKind.PASS_THROUGH for kind in rule.kinds) or rule.blocked:
        return False
    return len({dims for dims in (*rule.operands, *rule.results) if dims}) <= 1
