"""Folding: ops and slots that play the same part in repeated layers become one class, which is decided once.

Colours are refined a few rounds: an op's new colour says its own and those of its slots, a slot's new colour its own and those of
the ops around it. After `ROUNDS` rounds two ops have one colour where everything within that distance is alike, so layers in the
middle share their classes while those near the ends of the program keep their own. A fold only restricts the choices (all members
of a class decide alike): the cost of every choice stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmdctx.search.space import NO_SLOT, Space

ROUNDS = 3
SMALL = 200
"""Programs of so few ops are not folded: every op decides on its own."""

_U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Fold:
    """The class of each op and slot (-1 for those that cost nothing to place), and the members of each class in order."""

    op_class: list[int]
    slot_class: list[int]
    op_members: list[list[int]]
    slot_members: list[list[int]]


def fold(space: Space, op_marks: Sequence[int], slot_marks: Mapping[int, int]) -> Fold:
    """Folds a space.

    Args:
        space: the graph with its kinds of ops; the mesh plays no part.
        op_marks: per op a number that members of a class must share, beside their kind.
        slot_marks: the same for slots; those not named have 0. (Pinned ones, say.)
    """
    ops, slots, places = _incidences(space)
    op_colour, slot_colour = _first_colours(space, op_marks, slot_marks)
    if len(space.op_slots) <= SMALL:
        op_colour, slot_colour = np.arange(len(op_colour)).astype(np.uint64), np.arange(len(slot_colour)).astype(np.uint64)
    else:
        for _ in range(ROUNDS):
            around = np.zeros_like(op_colour)
            np.add.at(around, ops, _mixed(slot_colour[slots] * np.uint64(3) + places))
            op_colour = _mixed(op_colour * np.uint64(5) + around)
            around = np.zeros_like(slot_colour)
            np.add.at(around, slots, _mixed(op_colour[ops] * np.uint64(7) + places))
            slot_colour = _mixed(slot_colour * np.uint64(11) + around)
    taking_part = sorted(set(slots.tolist()))
    op_class, op_members = _classes(op_colour, [index for index, own in enumerate(space.op_slots) if _decides(space, index, own)])
    slot_class, slot_members = _classes(slot_colour, taking_part)
    return Fold(op_class, slot_class, op_members, slot_members)


def _decides(space: Space, index: int, slots: tuple[int, ...]) -> bool:
    """Whether an op makes anything that is not free to place."""
    results = slots[len(space.graph.ops[index].operands) :]
    return not results or any(slot not in space.loose_slots for slot in results)


def _incidences(space: Space) -> tuple[NDArray[np.int64], NDArray[np.int64], _U64]:
    """Op, slot and position of every operand and result that is not free to place."""
    ops: list[int] = []
    slots: list[int] = []
    places: list[int] = []
    loose = space.loose_slots
    for index, own in enumerate(space.op_slots):
        for place, slot in enumerate(own):
            if slot != NO_SLOT and slot not in loose:
                ops.append(index)
                slots.append(slot)
                places.append(place)
    return np.array(ops, dtype=np.int64), np.array(slots, dtype=np.int64), _mixed(np.array(places, dtype=np.uint64) + np.uint64(77))


def _first_colours(space: Space, op_marks: Sequence[int], slot_marks: Mapping[int, int]) -> tuple[_U64, _U64]:
    graph = space.graph
    kinds: dict[tuple[int, int, int], int] = {}
    op_kinds = [
        kinds.setdefault((kind, op.repeats, mark), len(kinds)) for kind, op, mark in zip(space.kind_of, graph.ops, op_marks, strict=True)
    ]
    shapes: dict[tuple[object, ...], int] = {}
    slot_kinds = [shapes.setdefault((value.shape, value.dtype, slot_marks.get(value.id, 0)), len(shapes)) for value in graph.values]
    return _mixed(np.array(op_kinds, dtype=np.uint64) + np.uint64(1)), _mixed(np.array(slot_kinds, dtype=np.uint64) + np.uint64(1 << 32))


def _classes(colours: _U64, members: list[int]) -> tuple[list[int], list[list[int]]]:
    """Classes numbered by their first member."""
    class_of = [-1] * len(colours)
    found: dict[int, int] = {}
    lists: list[list[int]] = []
    for member, colour in zip(members, colours[members].tolist(), strict=True):
        number = found.setdefault(colour, len(found))
        if number == len(lists):
            lists.append([])
        lists[number].append(member)
        class_of[member] = number
    return class_of, lists


def _mixed(numbers: _U64) -> _U64:
    """A bijection that spreads every bit (the finaliser of MurmurHash3)."""
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ (numbers >> np.uint64(33))
