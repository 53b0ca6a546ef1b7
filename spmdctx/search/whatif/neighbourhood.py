"""The changes that follow if some values of an assignment are forced into other shardings: the ops around, and values that come along.

    1. force     the given slots; as a second variant with them all slots of equal shape and sharding that element-wise ops link
    2. polish    slots next to a change try what the ops around them want, as long as the sum of these ops gets cheaper
    3. choose    ops next to a change take their cheapest candidate

Everything else stays as it is. Slots that are fixed stay too, unless they are among the forced ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from spmdctx.ir.analysis.chains import Walk
from spmdctx.ir.mesh import divides
from spmdctx.ir.projection import project
from spmdctx.ir.rule import OpRule
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.search.problem.space import NO_SLOT, Space
from spmdctx.search.propagation import keeps_dimensions

MAX_TRIALS = 120

Changes = dict[int, int]
"""The number of the new sharding of each changed slot."""


class Neighbourhood:
    """An assignment of a space, and its changes when slots are forced.

    Args:
        space: the graph on its mesh.
        assignment: the plan's.
        fixed: values that must stay as they are.
        forced: ops whose axes are not free.
    """

    def __init__(self, space: Space, assignment: Assignment, fixed: Collection[int], forced: Collection[int]) -> None:
        self.space, self.assignment = space, assignment
        self.fixed = {space.slot_of[value] for value in fixed}
        self.forced = frozenset(forced)
        self.state = [*(space.number(sharding) for sharding in assignment.values), NO_SLOT]
        self._simple: dict[int, bool] = {}

    def move(self, wanted: Mapping[int, TensorSharding], *, polish: bool = True) -> tuple[float, Changes]:
        """Forces the shardings `wanted`, by value.

        Returns the seconds per step that this costs by the prices of the ops around, and the changes.
        """
        own: Changes = {self.space.slot_of[value]: self.space.number(sharding) for value, sharding in wanted.items()}
        variants = [own]
        followers = self._followers(own)
        if followers:
            variants.append({**followers, **own})
        best = min(variants, key=self._delta_s)
        if polish:
            best = self._polished(best, frozenset(own))
        return self._delta_s(best), best

    def assignment_with(self, changes: Changes) -> Assignment:
        """Returns the assignment with the changes, and with the ops next to them chosen anew."""
        state = self._state_with(changes)
        ops = list(self.assignment.ops)
        for index in self._around(changes):
            if index not in self.forced:
                ops[index] = self.space.choose(index, state).sharding
        values = list(self.assignment.values)
        for value, slot in enumerate(self.space.slot_of):
            if slot in changes:
                values[value] = self.space.shardings[changes[slot]]
        return Assignment(tuple(ops), tuple(values), self.assignment.mode)

    def options(self, value: int) -> list[TensorSharding]:
        """Lists other shardings of a value: one axis or two anywhere, none at all, and those that the ops around want."""
        space = self.space
        slot = space.slot_of[value]
        shape, names = space.shapes[slot], [name for name, size in space.mesh.axes if size > 1]
        rank = len(shape)
        ones = [(dim, name) for dim in range(rank) for name in names]
        found: dict[TensorSharding, None] = {((),) * rank: None}
        for place in ones:
            found[_sharding(rank, place)] = None
        for first in ones:
            for second in ones:
                if first[1] != second[1] and (first[0] < second[0] or first[0] == second[0]):
                    found[_sharding(rank, first, second)] = None
        for number in self._proposals(slot, self.state):
            found[space.shardings[number]] = None
        own = self.assignment.values[value]
        return [sharding for sharding in found if sharding != own and divides(shape, sharding, space.mesh)]

    def _state_with(self, changes: Changes) -> list[int]:
        state = list(self.state)
        for slot, number in changes.items():
            state[slot] = number
        return state

    def _around(self, slots: Iterable[int]) -> list[int]:
        return sorted({index for slot in slots for index in self.space.neighbours[slot]})

    def _cost_s(self, ops: Iterable[int], state: list[int]) -> float:
        space = self.space
        return sum(space.choose(index, state).time_s * space.graph.ops[index].repeats for index in ops if index not in self.forced)

    def _delta_s(self, changes: Changes) -> float:
        around = self._around(changes)
        return self._cost_s(around, self._state_with(changes)) - self._cost_s(around, self.state)

    def _followers(self, own: Changes) -> Changes:
        """Returns the free slots that would go with a forced one: element-wise ops link them, and shape and sharding are equal."""
        space = self.space
        found: Changes = {}
        for start, number in own.items():
            walk = Walk([start])
            for slot in walk:
                simple = [index for index in space.neighbours[slot] if self._is_simple(space.graph.ops[index].rule)]
                walk.reach(
                    other for index in simple for other in space.op_slots[index] if other not in own and self._goes_with(other, start)
                )
            found.update({slot: number for slot in walk.met if slot not in own and slot not in found})
        return found

    def _goes_with(self, other: int, start: int) -> bool:
        """Returns whether a slot is free and has the shape and the sharding of a forced one."""
        space = self.space
        if other == NO_SLOT or other in self.fixed:
            return False
        return space.shapes[other] == space.shapes[start] and self.state[other] == self.state[start]

    def _is_simple(self, rule: OpRule) -> bool:
        known = self._simple.get(id(rule))
        if known is None:
            known = self._simple[id(rule)] = keeps_dimensions(rule)
        return known

    def _proposals(self, slot: int, state: list[int]) -> list[int]:
        """Returns the numbers of the shardings in which the ops around a slot would take it, as they are cheapest now."""
        space = self.space
        found: dict[int, None] = {}
        for index in space.neighbours[slot]:
            if index in self.forced:
                continue
            axes, rule = space.choose(index, state).axes, space.graph.ops[index].rule
            for other, dims in zip(space.op_slots[index], (*rule.operands, *rule.results), strict=True):
                if other == slot:
                    found[space.number(project(dims, axes))] = None
        return [number for number in found if number != state[slot]]

    def _polished(self, changes: Changes, own: frozenset[int]) -> Changes:
        """Lets the free slots around try the shardings that their ops want; a limit on trials ends it early, alike on every machine."""
        space, state = self.space, self._state_with(changes)
        changes = dict(changes)
        queue = self._next_to(changes)
        trials = 0
        while queue and trials < MAX_TRIALS:
            slot = queue.pop(0)
            if slot in own or slot in self.fixed or slot in space.free_slots:
                continue
            around = space.neighbours[slot]
            best, best_s = state[slot], self._cost_s(around, state)
            for number in self._proposals(slot, state):
                trials += 1
                if not divides(space.shapes[slot], space.shardings[number], space.mesh):
                    continue
                kept, state[slot] = state[slot], number
                time_s = self._cost_s(around, state)
                state[slot] = kept
                if time_s < best_s * (1 - 1e-6):
                    best, best_s = number, time_s
            if best != state[slot]:
                state[slot] = changes[slot] = best
                queue += [other for other in self._next_to([slot]) if other not in queue]
        return changes

    def _next_to(self, slots: Iterable[int]) -> list[int]:
        space = self.space
        inside = set(slots)
        found = {slot: None for index in self._around(inside) for slot in space.op_slots[index] if slot != NO_SLOT}
        return [slot for slot in found if slot not in inside]


def _sharding(rank: int, *places: tuple[int, str]) -> TensorSharding:
    dims: list[tuple[str, ...]] = [()] * rank
    for dim, name in places:
        dims[dim] = (*dims[dim], name)
    return tuple(dims)
