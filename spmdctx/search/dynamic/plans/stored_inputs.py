"""The placement of values that every reader takes as a slice: they are stored sliced unless the user asks for more.

Stored whole, such a value costs the same seconds and more memory. This applies to arguments, and to values that depend on no input and
enter a loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from spmdctx.ir.graph import LITERAL, Op
from spmdctx.ir.primitives import Boundary
from spmdctx.ir.projection import merge, project
from spmdctx.ir.sharding import Assignment, AxisNames, OpSharding, TensorSharding
from spmdctx.search.problem.space import Space
from spmdctx.search.setup.marks import PinnedDims


def store_as_read(space: Space, assignment: Assignment, pins: Mapping[int, PinnedDims]) -> Assignment:
    """Splits arguments, and values that enter loops for free, as far as all of their readers do.

    Left as they are: values that are tied to another one (state), that the step returns, that no op reads, or whose slots are in
    `pins`.
    """
    graph = space.graph
    entering = {op.results[0]: op for op in graph.ops if op.boundary is Boundary.ENTER and _is_free(space, op)}
    free = _alone(space, [*graph.inputs, *entering], pins)
    agreed: dict[int, TensorSharding] = {}
    for op in graph.ops:
        if free.isdisjoint(op.operands):
            continue
        for value, dims in zip(op.operands, op.rule.operands, strict=True):
            if value != LITERAL and value in free:
                wanted = project(dims, assignment.ops[op.id].axes)
                agreed[value] = tuple(map(_common, agreed[value], wanted)) if value in agreed else wanted
    values, ops = list(assignment.values), list(assignment.ops)
    for value, sharding in agreed.items():
        if _is_slice(values[value], sharding):
            values[value] = sharding
            if value in entering:
                ops[entering[value].id] = _boundary(space, entering[value], sharding)
    return replace(assignment, values=tuple(values), ops=tuple(ops))


def enter_as_stored(space: Space, assignment: Assignment) -> Assignment:
    """Lets loops take entering values in the split in which they keep them, where that is a slice on the way in.

    The slice may have to be written for that. Returns the same object if nothing changes.
    """
    ops = list(assignment.ops)
    for op in space.graph.ops:
        if op.boundary is Boundary.ENTER and op.operands[0] != LITERAL:
            stored, inside = (assignment.values[value] for value in (op.operands[0], op.results[0]))
            chosen = _boundary(space, op, inside)
            if project(op.rule.results[0], chosen.axes) == inside and _is_slice(stored, project(op.rule.operands[0], chosen.axes)):
                ops[op.id] = chosen
    return assignment if tuple(ops) == assignment.ops else replace(assignment, ops=tuple(ops))


def only_free_enter(space: Space, assignment: Assignment, entered: Assignment) -> bool:
    """Returns whether only values that depend on no input enter loops otherwise than in an assignment.

    They are made in the slices that loops take: `entered` costs no more seconds.
    """
    changed = (op for op, own, other in zip(space.graph.ops, assignment.ops, entered.ops, strict=True) if own != other)
    return all(space.slot_of[op.operands[0]] in space.free_slots for op in changed)


def _boundary(space: Space, op: Op, inside: TensorSharding) -> OpSharding:
    return OpSharding(merge(op.rule, [(op.rule.results[0], inside)], space.splittable(op.rule), space.mesh))


def _is_slice(whole: TensorSharding, part: TensorSharding) -> bool:
    return all(new[: len(old)] == old for old, new in zip(whole, part, strict=True))


def _is_free(space: Space, op: Op) -> bool:
    """Returns whether a loop's entry takes a value that depends on no input, and hands it to ops that are part of the search."""
    slots = space.op_slots[op.id]
    return slots[0] in space.free_slots and slots[1] not in space.free_slots


def _alone(space: Space, values: Sequence[int], pins: Mapping[int, PinnedDims]) -> set[int]:
    """Returns the values that are part of the search, tied to nothing, not pinned, and not returned."""
    counts = Counter(space.slot_of)
    outputs = frozenset(space.graph.outputs)
    slots = {value: space.slot_of[value] for value in values if value not in outputs}
    return {value for value, slot in slots.items() if counts[slot] == 1 and slot not in pins and slot not in space.free_slots}


def _common(first: AxisNames, second: AxisNames) -> AxisNames:
    """Returns the axes that two dimensions have in common at the start."""
    return tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
