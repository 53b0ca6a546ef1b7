"""Sharding propagation, which spreads the pinned shardings through the graph and settles every conflict by predicted seconds.

1. spread   a slot may only gain axes; op by op, forwards and backwards, first through ops that keep all dimensions,
            then through all, until nothing changes
2. settle   slots that the neighbours disagree about try the neighbours' proposals, and keep the cheapest
3. choose   each op takes its cheapest candidate; values that depend on no input take what their readers want
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from spmdctx.ir.graph import LITERAL
from spmdctx.ir.projection import FactorAxes, joined, merge, project
from spmdctx.ir.rule import FactorKind, OpRule
from spmdctx.ir.sharding import Assignment, OpSharding, TensorSharding
from spmdctx.search.problem.space import NO_SLOT, Space

MAX_SWEEPS = 8
SETTLE_ROUNDS = 4
NOTHING: Mapping[int, bool] = MappingProxyType({})


def propagate(
    space: Space,
    pins: Mapping[int, TensorSharding],
    forced: Mapping[int, FactorAxes],
    seeds: Mapping[int, TensorSharding],
    one_way: Mapping[int, bool] = NOTHING,
    later: Collection[int] = (),
) -> Assignment:
    """Assigns a sharding to every value and op.

    Args:
        space: the graph on its mesh.
        pins: value id to the sharding it must have.
        forced: op id to the axes its factors must have (manual regions).
        seeds: value id to a sharding that spreads like a pin, but may be overruled.
        one_way: id of an identity op to whether shardings spread from its operand to its result only, or back only.
        later: values whose pins and seeds spread when those of all others have: where two want one axis, the others have it.
    """
    spreader = Spreader(space, {value: sharding for value, sharding in pins.items() if value not in later}, forced, one_way)
    spreader.seed({value: sharding for value, sharding in seeds.items() if value not in later})
    spreader.spread()
    if later:
        spreader.pin({value: pins[value] for value in later if value in pins})
        spreader.seed({value: seeds[value] for value in later if value in seeds})
        spreader.spread()
    state, fixed = spreader.state, spreader.fixed
    settle(space, state, fixed, forced)
    place_values_from_literals(space, state, fixed)
    chosen = [OpSharding(forced[i]) if i in forced else space.choose(i, state).sharding for i in range(len(space.op_slots))]
    values = tuple([space.shardings[state[slot]] for slot in space.slot_of])
    return Assignment(tuple(chosen), values, "sharding_propagation")


class Spreader:
    """The state of the spreading: a sharding number per slot, the fixed slots, and the ops that must be visited again."""

    def __init__(
        self, space: Space, pins: Mapping[int, TensorSharding], forced: Mapping[int, FactorAxes], one_way: Mapping[int, bool]
    ) -> None:
        self.space = space
        self.state = list(space.whole)
        self.fixed: set[int] = set()
        self.dirty: set[int] = set()
        self.forced = forced
        self.one_way = one_way
        self._memo: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.pin(pins)
        for index, axes in forced.items():
            rule = space.graph.ops[index].rule
            for slot, dims in zip(space.op_slots[index], (*rule.operands, *rule.results), strict=True):
                if slot != NO_SLOT and slot not in self.fixed:
                    self.put(slot, project(dims, axes))

    def pin(self, pins: Mapping[int, TensorSharding]) -> None:
        """Gives values shardings for good."""
        for value, sharding in pins.items():
            slot = self.space.slot_of[value]
            self.fixed.add(slot)
            self.put(slot, sharding)

    def seed(self, seeds: Mapping[int, TensorSharding]) -> None:
        """Gives values that are not pinned shardings that may change."""
        for value, sharding in seeds.items():
            slot = self.space.slot_of[value]
            if slot not in self.fixed:
                self.put(slot, sharding)

    def put(self, slot: int, sharding: TensorSharding) -> None:
        """Gives a slot its sharding and wakes the ops around it."""
        self.state[slot] = self.space.number(sharding)
        self.dirty.update(self.space.neighbours[slot])

    def spread(self) -> None:
        """Spreads first through ops that keep every dimension, then through all ops; alternates between forwards and backwards."""
        rules = {id(op.rule): op.rule for op in self.space.graph.ops}
        simple_kinds = [keeps_dimensions(rules[kind.rule]) for kind in self.space.kinds]
        simple = [simple_kinds[kind] for kind in self.space.kind_of]
        for only_simple in (True, False):
            if not only_simple:
                for neighbours, number, whole in zip(self.space.neighbours, self.state, self.space.whole, strict=False):
                    if number != whole:
                        self.dirty.update(neighbours)
            backwards = False
            for _ in range(MAX_SWEEPS * 2):
                batch = sorted((i for i in self.dirty if simple[i]) if only_simple else self.dirty, reverse=backwards)
                if not batch:
                    break
                self._sweep(batch, simple if only_simple else None, backwards)
                backwards = not backwards

    def _sweep(self, batch: list[int], allowed: list[bool] | None, backwards: bool) -> None:
        """Visits the ops in order, and in the same sweep the ops further on that a visit wakes."""
        sign = -1 if backwards else 1
        heap = [sign * index for index in batch]
        queued = set(batch)
        while heap:
            index = sign * heapq.heappop(heap)
            queued.discard(index)
            self.dirty.discard(index)
            for slot in self.visit(index):
                for other in self.space.neighbours[slot]:
                    if other == index:
                        continue
                    ahead = (other < index) if backwards else (other > index)
                    if ahead and other not in queued and (allowed is None or allowed[other]):
                        queued.add(other)
                        heapq.heappush(heap, sign * other)
                    elif not ahead:
                        self.dirty.add(other)

    def visit(self, index: int) -> Sequence[int]:
        """Spreads between the tensors of one op; returns the slots that changed."""
        if index in self.forced:
            return ()
        if index in self.one_way:
            return self._visit_one_way(index)
        state = self.state
        key = self.space.key(index, state)
        after = self._memo.get(key)
        if after is None:
            before = key[1:]
            after = self._transfer(index, before)
            after = self._memo[key] = after if after != before else ()
        if not after:
            return ()
        changed = []
        for slot, old, new in zip(self.space.op_slots[index], key[1:], after, strict=True):
            if old != new and slot not in self.fixed and state[slot] == old:
                state[slot] = new
                changed.append(slot)
        return changed

    def _visit_one_way(self, index: int) -> list[int]:
        source, target = self.space.op_slots[index] if self.one_way[index] else reversed(self.space.op_slots[index])
        if target in self.fixed or source == NO_SLOT:
            return []
        space, state = self.space, self.state
        new = space.number(joined(space.shardings[state[target]], space.shardings[state[source]], space.shapes[target], space.mesh))
        if new == state[target]:
            return []
        state[target] = new
        return [target]

    def _transfer(self, index: int, before: tuple[int, ...]) -> tuple[int, ...]:
        space, op = self.space, self.space.graph.ops[index]
        rule = op.rule
        sides = (*rule.operands, *rule.results)
        shardings = [space.shardings[number] if number != NO_SLOT else () for number in before]
        order = sorted(range(len(sides)), key=lambda i: -space.mesh.num_slices(name for dim in shardings[i] for name in dim))
        axes = merge(rule, [(sides[i], shardings[i]) for i in order if shardings[i]], space.splittable(rule), space.mesh)
        if not any(axes):
            return before
        values = (*op.operands, *op.results)
        return tuple(
            [
                NO_SLOT if value == LITERAL else space.number(joined(own, project(dims, axes), space.shapes[value], space.mesh))
                for value, dims, own in zip(values, sides, shardings, strict=True)
            ]
        )


def keeps_dimensions(rule: OpRule) -> bool:
    """Returns whether an op only passes dimensions through: all its tensors of full rank have the same factors."""
    sides = {dims for dims in (*rule.operands, *rule.results) if dims}
    return all(kind is FactorKind.PASS_THROUGH for kind in rule.kinds) and len(sides) <= 1


_Wanted = dict[tuple[int, ...], tuple[tuple[int, int], ...]]
"""The shardings that an op wants, by the op's key."""


def settle(space: Space, state: list[int], fixed: set[int], forced: Mapping[int, FactorAxes], suspects: list[int] | None = None) -> None:
    """Lets slots whose neighbours want another sharding try it, as long as the sum of the ops around gets cheaper.

    `suspects` are the ops that are looked at first, None for all.
    """
    suspects = list(range(len(space.op_slots))) if suspects is None else suspects
    memo: _Wanted = {}
    for _ in range(SETTLE_ROUNDS):
        proposals = _proposals(space, state, fixed, forced, suspects, memo)
        moved: set[int] = set()
        for slot, options in proposals.items():
            best = _try_options(space, state, slot, options, forced)
            if best != state[slot]:
                state[slot] = best
                moved.add(slot)
        if not moved:
            return
        suspects = sorted({op for slot in moved for op in space.neighbours[slot]})


def _proposals(
    space: Space, state: list[int], fixed: set[int], forced: Mapping[int, FactorAxes], ops: list[int], memo: _Wanted
) -> dict[int, list[int]]:
    """Returns for each slot the numbers of the other shardings in which an op around it would take it."""
    proposals: dict[int, dict[int, None]] = {}
    for index in ops:
        if index in forced:
            wanted = _wanted(space, state, index, [forced[index]])
        else:
            key = space.key(index, state)
            known = memo.get(key)
            wanted = memo[key] = _wanted(space, state, index, _ways(space, state, index)) if known is None else known
        for position, number in wanted:
            slot = space.op_slots[index][position]
            if slot not in fixed and slot not in space.free_slots:
                proposals.setdefault(slot, {})[number] = None
    return {slot: list(options) for slot, options in proposals.items()}


def _wanted(space: Space, state: list[int], index: int, ways: list[FactorAxes]) -> tuple[tuple[int, int], ...]:
    """Returns the position and number of each sharding in which an op would take a slot other than in its present one."""
    rule = space.graph.ops[index].rule
    wanted = []
    for axes in ways:
        for position, (slot, dims) in enumerate(zip(space.op_slots[index], (*rule.operands, *rule.results), strict=True)):
            if slot != NO_SLOT and (number := space.number(project(dims, axes))) != state[slot]:
                wanted.append((position, number))
    return tuple(wanted)


def _ways(space: Space, state: list[int], index: int) -> list[FactorAxes]:
    """Returns the ways to do an op: the cheapest one first.

    Where the cheapest reshards a result, the way that the result's sharding suggests is tried too.
    """
    op, slots = space.graph.ops[index], space.op_slots[index]
    own = space.choose(index, state).axes
    results = [(dims, space.shardings[state[slot]]) for slot, dims in zip(slots[len(op.operands) :], op.rule.results, strict=True)]
    if all(project(dims, own) == sharding for dims, sharding in results):
        return [own]
    return [own, merge(op.rule, results, space.splittable(op.rule), space.mesh)]


def _try_options(space: Space, state: list[int], slot: int, options: list[int], forced: Mapping[int, FactorAxes]) -> int:
    around = [index for index in space.neighbours[slot] if index not in forced]
    kept = best = state[slot]
    best_s = sum(space.choose(index, state).time_s * space.graph.ops[index].repeats for index in around)
    num_slices = space.mesh.num_slices(name for dim in space.shardings[kept] for name in dim)
    for option in options:
        if space.mesh.num_slices(name for dim in space.shardings[option] for name in dim) < num_slices:
            # More memory and compute on every device would be a bad way to save a collective.
            continue
        if any(size % space.mesh.num_slices(dim) for size, dim in zip(space.shapes[slot], space.shardings[option], strict=True)):
            continue
        state[slot] = option
        time_s = sum(space.choose(index, state).time_s * space.graph.ops[index].repeats for index in around)
        if time_s < best_s * (1 - 1e-6):
            best, best_s = option, time_s
    state[slot] = kept
    return best


def place_values_from_literals(space: Space, state: list[int], fixed: set[int]) -> None:
    """Gives values that depend on no input the sharding on which all their readers agree, dimension by dimension."""
    if not space.free_slots:
        return
    touching = [index for index, kind in enumerate(space.kind_of) if space.kinds[kind].free]
    for index in reversed(touching):
        for value in space.graph.ops[index].results:
            slot = space.slot_of[value]
            if slot in space.free_slots and slot not in fixed:
                state[slot] = space.number(_agreed(space, state, slot, index))


def _agreed(space: Space, state: list[int], slot: int, producer: int) -> TensorSharding:
    demands: TensorSharding | None = None
    for index in space.neighbours[slot]:
        if index == producer:
            continue
        op = space.graph.ops[index]
        axes = space.choose(index, state).axes
        for operand_slot, dims in zip(space.op_slots[index], op.rule.operands, strict=False):
            if operand_slot == slot:
                wanted = project(dims, axes)
                demands = wanted if demands is None else tuple(a if a == b else () for a, b in zip(demands, wanted, strict=True))
    shape = space.shapes[slot]
    if demands is None:
        return ((),) * len(shape)
    return tuple(dim if size % space.mesh.num_slices(dim) == 0 else () for dim, size in zip(demands, shape, strict=True))
