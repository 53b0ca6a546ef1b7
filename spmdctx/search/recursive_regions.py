"""Moves of a whole activation: the values between two matrix products change together, and the weights around them follow.

So a feed-forward layer turns from split by the batch to split by its hidden features in one step: the hidden values, their
cotangents, both weights and their optimizer state. A move is kept where the sum of all ops around it gets cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spmdctx.ir import TensorSharding
from spmdctx.mesh import divides
from spmdctx.search.algo import is_elementwise
from spmdctx.search.recursive_shared import SharedPrice
from spmdctx.search.recursive_storage import Block, rules_of
from spmdctx.search.space import NO_SLOT, Space
from spmdctx.search.transfer import merge, project


class Region(NamedTuple):
    """Slots of one shape that are linked by element-wise ops, the ops around them, and those of the ops that are main ops."""

    slots: tuple[int, ...]
    ops: tuple[int, ...]
    mains: tuple[int, ...]


class _Move(NamedTuple):
    before: tuple[tuple[int, int], ...]
    ops: tuple[int, ...]


def activation_regions(space: Space, mains: Sequence[int], blocks: Sequence[Block]) -> list[Region]:
    """The regions of what the given ops make, in their order, without stored tensors."""
    stored = {slot for block in blocks for slot in block.slots}
    simple = [is_elementwise(rule) for rule in rules_of(space)]
    is_main = frozenset(mains)
    seen: set[int] = set()
    regions = []
    for index in mains:
        start = space.op_slots[index][-1]
        if start not in seen and start not in stored and len(space.shapes[start]) > 1:
            regions.append(_grow(space, start, simple, seen, is_main))
    return regions


def _grow(space: Space, start: int, simple: list[bool], seen: set[int], is_main: frozenset[int]) -> Region:
    shape = space.shapes[start]
    seen.add(start)
    slots, pending, around = [start], [start], dict[int, None]()
    while pending:
        for index in space.neighbours[pending.pop()]:
            if index in around:
                continue
            around[index] = None
            if simple[space.kind_of[index]]:
                for slot in space.op_slots[index]:
                    if slot != NO_SLOT and slot not in seen and space.shapes[slot] == shape and slot not in space.loose_slots:
                        seen.add(slot)
                        slots.append(slot)
                        pending.append(slot)
    return Region(tuple(sorted(slots)), tuple(sorted(around)), tuple([index for index in sorted(around) if index in is_main]))


def settle_regions(
    space: Space, state: list[int], fixed: set[int], regions: Sequence[Region], blocks: Sequence[Block], prices: SharedPrice
) -> bool:
    """Tries all moves of each region once, and keeps those that pay; says whether any did."""
    block_of = {slot: block for block in blocks for slot in block.slots if not any(own in fixed for own in block.slots)}
    changed = False
    for region in regions:
        if any(slot in fixed for slot in region.slots):
            continue
        best: _Move | None = None
        best_state: list[tuple[int, int]] = []
        best_gain = 0.0
        for number in _options(space, state, region):
            move = _apply(space, state, region, number, block_of, prices)
            after = prices.seconds(state, move.ops)
            applied = [(slot, state[slot]) for slot, _ in move.before]
            for slot, old in move.before:
                state[slot] = old
            gain = prices.seconds(state, move.ops) - after
            if gain > best_gain * (1 + 1e-6):
                best, best_state, best_gain = move, applied, gain
        if best is not None:
            changed = True
            for slot, new in best_state:
                state[slot] = new
    return changed


def settle_inputs(space: Space, state: list[int], fixed: set[int], slots: Sequence[int], prices: SharedPrice) -> None:
    """Lets arguments lie as one of their readers takes them: whole too, since nobody computes them."""
    for slot in slots:
        if slot in fixed:
            continue
        ops = space.neighbours[slot]
        wishes: dict[int, None] = {}
        for index in ops:
            op = space.graph.ops[index]
            results = [
                (dims, space.shardings[state[own]])
                for own, dims in zip(space.op_slots[index][len(op.operands) :], op.rule.results, strict=True)
            ]
            for axes in (space.choose(index, state).axes, merge(op.rule, results, space.splittable(op.rule), space.mesh)):
                for own, dims in zip(space.op_slots[index], op.rule.operands, strict=False):
                    wanted = project(dims, axes) if own == slot else ()
                    if wanted and divides(space.shapes[slot], wanted, space.mesh):
                        wishes[space.number(wanted)] = None
        wishes[space.whole[slot]] = None
        best, best_s = state[slot], prices.seconds(state, ops)
        for number in wishes:
            state[slot] = number
            time_s = prices.seconds(state, ops)
            if time_s < best_s * (1 - 1e-6):
                best, best_s = number, time_s
        state[slot] = best


def _options(space: Space, state: list[int], region: Region) -> list[int]:
    """Each axis, and all of them together, on each dimension."""
    shape = space.shapes[region.slots[0]]
    found: dict[int, None] = {}
    for base in dict.fromkeys(space.shardings[state[slot]] for slot in region.slots):
        for longer in _moved(space, base):
            if all(size % space.mesh.num_slices(names) == 0 for size, names in zip(shape, longer, strict=True)):
                found[space.number(longer)] = None
    return list(found)


def _moved(space: Space, base: TensorSharding) -> Iterator[TensorSharding]:
    names = space.mesh.names
    for moving in dict.fromkeys([names, *((name,) for name in names)]):
        rest = tuple([tuple([name for name in own if name not in moving]) for own in base])
        for dim in range(len(base)):
            yield (*rest[:dim], (*rest[dim], *moving), *rest[dim + 1 :])


def _apply(space: Space, state: list[int], region: Region, number: int, block_of: dict[int, Block], prices: SharedPrice) -> _Move:
    """Moves the region; the blocks of the weights next to it follow where that is cheaper."""
    before = {slot: state[slot] for slot in region.slots}
    ops = dict.fromkeys(region.ops)
    for slot in region.slots:
        state[slot] = number
    for block, wishes in _wishes(space, state, region, block_of).values():
        ops.update(dict.fromkeys(block.ops))
        old = [state[slot] for slot in block.slots]
        before.update(zip(block.slots, old, strict=True))
        best, best_s = old, prices.seconds(state, block.ops)
        for wish in wishes:
            for slot in block.slots:
                state[slot] = block.to_slot(space, slot, wish)
            time_s = prices.seconds(state, block.ops)
            if time_s < best_s:
                best, best_s = [state[slot] for slot in block.slots], time_s
        for slot, new in zip(block.slots, best, strict=True):
            state[slot] = new
    return _Move(tuple(before.items()), tuple(ops))


_Wishes = dict[int, tuple[Block, dict[TensorSharding, None]]]


def _wishes(space: Space, state: list[int], region: Region, block_of: dict[int, Block]) -> _Wishes:
    """The blocks next to a region, by their first slot, and what the region's main ops make of them."""
    members = frozenset(region.slots)
    found: _Wishes = {}
    for index in region.mains:
        rule = space.graph.ops[index].rule
        sides = list(zip(space.op_slots[index], (*rule.operands, *rule.results), strict=True))
        leading = [(dims, space.shardings[state[slot]]) for slot, dims in sides if slot in members]
        axes = merge(rule, leading, space.splittable(rule), space.mesh)
        for slot, dims in sides:
            block = block_of.get(slot)
            if block is not None:
                found.setdefault(block.slots[0], (block, {}))[1][block.to_base(slot, project(dims, axes))] = None
    return found
