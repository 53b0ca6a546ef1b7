"""The splits of a program whose ops stand in a row in a larger one."""

from __future__ import annotations

from collections.abc import Mapping

from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.mesh import replicated
from spmdctx.ir.sharding import Assignment, TensorSharding


def excerpt(whole: Graph, assignment: Assignment, first: int, part: Graph, given: Mapping[int, TensorSharding]) -> Assignment | None:
    """Returns how a program is split if it is a row of ops in a larger one, which is planned; None if it is not.

    Args:
        whole: the larger program.
        assignment: its splits.
        first: where the row begins.
        part: the program.
        given: the shardings of some of its values, which may differ from those in the larger one.
    """
    row = whole.ops[first : first + len(part.ops)]
    if len(row) < len(part.ops):
        return None
    values = dict(given)
    for own, other in zip(part.ops, row, strict=True):
        if not _is_same(own, other):
            return None
        for value, twin in zip((*own.operands, *own.results), (*other.operands, *other.results), strict=True):
            if (value == LITERAL) != (twin == LITERAL):
                return None
            if value != LITERAL:
                values.setdefault(value, assignment.values[twin])
    all_values = tuple([values.get(number, replicated(len(value.shape))) for number, value in enumerate(part.values)])
    return Assignment(assignment.ops[first : first + len(part.ops)], all_values, assignment.mode)


def _is_same(own: Op, other: Op) -> bool:
    are_many = len(own.operands) == len(other.operands) and len(own.results) == len(other.results)
    return are_many and own.primitive == other.primitive and (own.rule is other.rule or own.rule == other.rule)
