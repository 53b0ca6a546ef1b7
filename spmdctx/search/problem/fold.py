"""The fold of a program: ops and slots that play the same part in repeated layers become one class, which is decided once.

Colours are refined a few rounds. An op's new colour stands for its own and those of its slots; a slot's new colour stands for its own
and those of the ops around it. After `Folding.rounds` rounds, two ops share a colour if everything within that distance is alike. So layers
in the middle of the program share their classes, while those near its ends keep their own.

Ops whose results reach no further matrix product (the update of one parameter, say) connect no layers. The fold refines them further,
so that they follow the gradient from which they come.

Classes of few members are not folded: they are rarely layers. Ops on scores and on the transposed scores look alike, too, but need
different splits. Nor is anything folded in a small program, or where that leaves most classes: a search without the fold takes as little
time there, and proves its plan against all others.

A fold only restricts the choices, because all members of a class decide alike. The cost of every choice stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spmdctx.ir.analysis.incidence import ends, executions
from spmdctx.ir.analysis.numbering import Numbering, numbered_rows
from spmdctx.ir.arrays import BoolArray, IntArray
from spmdctx.search.problem.space import Space

ROUNDS = 3
UPDATE_ROUNDS = 8
SMALL = 500
FEW = 2
MOST = 2 / 3
LARGE = 900


class Folding(NamedTuple):
    """The options of a fold.

    Attributes:
        rounds: how far around ops of one class must be alike.
        small_program: ops up to which nothing is folded: every op decides on its own.
        few: members up to which a class is not folded either.
        most: share of the ops and slots up to which a fold may leave classes; else it is not worth what it hides.
        large_program: ops from which a fold may leave more. Searches within memory are limited there, and take other ways without it.
    """

    rounds: int = ROUNDS
    small_program: int = SMALL
    few: int = FEW
    most: float = MOST
    large_program: int = LARGE


FOLDING = Folding()

_Colours = tuple[IntArray, IntArray]
"""The colours of ops, and those of slots."""


class _Around(NamedTuple):
    """The places where slots meet ops, in the order of the ops: the op, the slot and the place among operands and results."""

    ops: IntArray
    slots: IntArray
    places: IntArray

    def met(self, colours: IntArray) -> IntArray:
        """Returns one number for each pair of a colour and a place; there is a colour for each meeting."""
        numbers: IntArray = colours * (int(self.places.max(initial=0)) + 1) + self.places
        return numbers


@dataclass(frozen=True, slots=True)
class Fold:
    """The class of each op and slot (-1 for those that cost nothing to place), and the members of each class in order."""

    op_class: list[int]
    slot_class: list[int]
    op_members: list[list[int]]
    slot_members: list[list[int]]


def fold(
    space: Space,
    op_marks: Sequence[int] | IntArray,
    slot_marks: Mapping[int, int],
    terminal: Sequence[int] = (),
    folding: Folding = FOLDING,
) -> Fold:
    """Folds a space.

    Args:
        space: the graph with its kinds of ops; the mesh plays no part.
        op_marks: per op a number that members of a class must share, beside their kind.
        slot_marks: the same for slots; those not named have 0. (Pinned ones, say.)
        terminal: per value, whether it leads to no matrix product; none where it is empty.
        folding: how far around ops of one class must be alike, and from which size on.
    """
    around = _around(space)
    colours = _first_colours(space, op_marks, slot_marks)
    ops, slots = _deciding(space), sorted(set(around.slots.tolist()))
    if len(space.op_slots) > folding.small_program:
        for _ in range(folding.rounds):
            colours = _refined(colours, around)
        if terminal:
            colours = _with_updates(space, colours, around, terminal)
        op_colour, slot_colour = (_few_apart(own, folding.few) for own in colours)
        left = len(np.unique(op_colour[ops])) + len(np.unique(slot_colour[slots]))
        if left <= folding.most * (len(ops) + len(slots)) or len(space.op_slots) >= folding.large_program:
            return _fold_of(op_colour, ops, slot_colour, slots)
    op_colour, slot_colour = (np.arange(len(own)) for own in colours)
    return _fold_of(op_colour, ops, slot_colour, slots)


def _fold_of(op_colour: IntArray, ops: list[int], slot_colour: IntArray, slots: list[int]) -> Fold:
    """Returns the classes of some ops and slots by their colours."""
    op_class, op_members = _classes(op_colour, ops)
    slot_class, slot_members = _classes(slot_colour, slots)
    return Fold(op_class, slot_class, op_members, slot_members)


def _refined(colours: _Colours, around: _Around) -> _Colours:
    """Runs one round: ops take in the colours of their slots, then slots those of their ops."""
    op_colour, slot_colour = colours
    op_colour = numbered_rows(op_colour, around.ops, around.met(slot_colour[around.slots]))
    met = around.met(op_colour[around.ops])
    order = np.lexsort((met, around.slots))
    return op_colour, numbered_rows(slot_colour, around.slots[order], met[order])


def _with_updates(space: Space, colours: _Colours, around: _Around, terminal: Sequence[int]) -> _Colours:
    """Runs more rounds for the ops whose results reach no matrix product, and for the slots that only such ops touch."""
    every = ends(space.graph)
    leads_on = ~np.array([*terminal, 0], dtype=bool)[every.values] & every.is_result
    inner = (every.num_results > 0) & (np.bincount(every.ops[leads_on], minlength=len(every.num_results)) == 0)
    inside = np.ones(len(colours[1]), dtype=bool)
    inside[around.slots[~inner[around.ops]]] = False
    for _ in range(UPDATE_ROUNDS):
        op_colour, slot_colour = _refined(colours, around)
        colours = _apart(inner, op_colour, colours[0]), _apart(inside, slot_colour, colours[1])
    return colours


def _apart(chosen: BoolArray, colours: IntArray, others: IntArray) -> IntArray:
    """Returns `colours` where `chosen`, and else `others`, in numbers that none of the chosen has."""
    return np.where(chosen, colours, others + int(colours.max(initial=0)) + 1)


def _few_apart(colours: IntArray, few: int) -> IntArray:
    """Returns the colours, but gives each op or slot one of its own where at most `few` share it."""
    own = np.arange(len(colours))
    return np.where(np.bincount(colours)[colours] <= few, own, colours + len(colours)) if len(colours) else own


def _deciding(space: Space) -> list[int]:
    """Lists the ops that make a value that is not free to place, or that make no value."""
    decides = ends(space.graph).num_results == 0
    decides[space.incidences.ops[space.incidences.is_result]] = True
    return np.flatnonzero(decides).tolist()


def _around(space: Space) -> _Around:
    """Returns op, slot and position of every operand and result that is not free to place."""
    every = space.incidences
    places = np.where(every.is_result, every.positions + ends(space.graph).num_operands[every.ops], every.positions)
    return _Around(every.ops, every.slots, places)


def _first_colours(space: Space, op_marks: Sequence[int] | IntArray, slot_marks: Mapping[int, int]) -> _Colours:
    graph = space.graph
    ops = Numbering(np.array(space.kind_of, dtype=np.int64))
    ops.refine(executions(graph))
    ops.refine(np.array(op_marks, dtype=np.int64))
    shapes: dict[tuple[object, ...], int] = {}
    slot_kinds = [shapes.setdefault((value.shape, value.dtype, slot_marks.get(value.id, 0)), len(shapes)) for value in graph.values]
    return ops.classes()[1], np.array(slot_kinds, dtype=np.int64)


def _classes(colours: IntArray, members: list[int]) -> tuple[list[int], list[list[int]]]:
    """Numbers the classes by their first members; returns each op's or slot's class, and the members of each class."""
    if not members:
        return [-1] * len(colours), []
    _, first, which = np.unique(colours[members], return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbers = rank[which]
    class_of = np.full(len(colours), -1, dtype=np.int64)
    class_of[members] = numbers
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=len(first)))[:-1]
    return class_of.tolist(), [own.tolist() for own in np.split(np.array(members, dtype=np.int64)[order], ends)]
