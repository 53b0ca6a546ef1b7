"""Arguments that every reader takes as a slice go in so sliced: to store them whole costs the same seconds and more memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile

from spmdctx.ir import LITERAL, Assignment, AxisNames, TensorSharding
from spmdctx.search.pins import PinnedDims
from spmdctx.search.space import Space
from spmdctx.search.transfer import project


def store_as_read(space: Space, assignment: Assignment, pins: Mapping[int, PinnedDims]) -> Assignment:
    """Splits the arguments of an assignment as far as all of their readers do.

    Left as they are: arguments that are tied to another value (state), that the step returns, that no op reads, or whose slots
    are in `pins`.
    """
    graph, slot_of = space.graph, space.slot_of
    counts: dict[int, int] = {}
    for slot in slot_of:
        counts[slot] = counts.get(slot, 0) + 1
    fixed = {*graph.outputs, *(value for value in graph.inputs if counts[slot_of[value]] > 1 or slot_of[value] in pins)}
    agreed: dict[int, TensorSharding] = {}
    free = set(graph.inputs) - fixed - {value for value in graph.inputs if slot_of[value] in space.loose_slots}
    for op in graph.ops:
        for value, dims in zip(op.operands, op.rule.operands, strict=True):
            if value != LITERAL and value in free:
                wanted = project(dims, assignment.ops[op.id].axes)
                agreed[value] = tuple(map(_common, agreed[value], wanted)) if value in agreed else wanted
    values = list(assignment.values)
    for value, sharding in agreed.items():
        if all(new[: len(old)] == old for old, new in zip(values[value], sharding, strict=True)):
            values[value] = sharding
    return replace(assignment, values=tuple(values))


def _common(first: AxisNames, second: AxisNames) -> AxisNames:
    """The axes with which both begin."""
    return tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
