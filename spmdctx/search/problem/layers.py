"""The layers of a folded program: what lies nearest to the same member of a class that has one member in every layer.

Which layer an op near the end of two layers is counted to matters little: layers only tell which ops may decide together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from spmdctx.search.problem.fold import FEW, Fold
from spmdctx.search.problem.space import NO_SLOT, Space

_MANY = 12
"""Ops around a slot from which it leads to no layer: masks, positions and tables are read by all of them."""

NOWHERE = -1
"""The layer of what is in none."""


class Layers(NamedTuple):
    """The number of layers, and the layer of each op and slot, or `NOWHERE`."""

    num_layers: int
    of_ops: Sequence[int]
    of_slots: Sequence[int]

    def together(self, pairs: Iterable[tuple[int, int]]) -> Layers:
        """Returns the layers with the second slot of each pair in the layer of the first."""
        slots = list(self.of_slots)
        for first, second in pairs:
            slots[second] = slots[first]
        return self._replace(of_slots=slots)


def layers_of(space: Space, folded: Fold) -> Layers | None:
    """Finds the layers of a folded space; None if nothing is folded."""
    members = Counter[int]()
    for own in folded.op_members:
        members[len(own)] += len(own)
    count = max(members, key=lambda size: (members[size] if size > FEW else 0, size), default=0)
    if count <= FEW:
        return None
    ops = space.graph.ops
    roots = max((own for own in folded.op_members if len(own) == count), key=lambda own: prod(ops[own[0]].rule.sizes))
    return Layers(count, *_nearest(space, roots))


def _nearest(space: Space, roots: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns for each op and slot the number of the root from which the fewest ops lead to it."""
    of_ops, of_slots = [NOWHERE] * len(space.op_slots), [NOWHERE] * len(space.neighbours)
    for number, op in enumerate(roots):
        of_ops[op] = number
    front = list(roots)
    while front:
        reached = []
        for op in front:
            for slot in space.op_slots[op]:
                if slot != NO_SLOT and of_slots[slot] == NOWHERE and len(space.neighbours[slot]) <= _MANY:
                    of_slots[slot] = of_ops[op]
                    reached.append(slot)
        front = []
        for slot in reached:
            for op in space.neighbours[slot]:
                if of_ops[op] == NOWHERE:
                    of_ops[op] = of_slots[slot]
                    front.append(op)
    return of_ops, of_slots
