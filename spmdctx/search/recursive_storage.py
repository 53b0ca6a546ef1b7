"""Moves that a single slot cannot make: a parameter, its optimizer state, its gradient and its update change together.

Each such block tries a few shardings for (a) all of it, (b) all but the copies that the forward pass reads, (c) all but the
parameter and those copies: ZeRO-3 without and with a gather of the copy, and ZeRO-1. Equal blocks are decided once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from spmdctx.ir import LITERAL, AxisNames, OpRule, Role, TensorSharding
from spmdctx.search.propagation import keeps_dimensions
from spmdctx.search.space import NO_SLOT, Space

_LARGEST = 400
_STORED = (Role.PARAMETER, Role.OPTIMIZER, Role.STATE)


class Block(NamedTuple):
    """Slots of one shape that are linked by element-wise ops.

    `copies` are the slots that are made of parameters alone, `parameters` those of the parameters; `ops` are all ops around.
    """

    slots: tuple[int, ...]
    parameters: frozenset[int]
    copies: frozenset[int]
    ops: tuple[int, ...]

    def parts(self) -> list[tuple[int, ...]]:
        """The sets of slots that may change together, the largest first."""
        kept = self.parameters | self.copies
        found = [self.slots, tuple([s for s in self.slots if s not in self.copies]), tuple([s for s in self.slots if s not in kept])]
        return [part for part in dict.fromkeys(found) if part]


def storage_blocks(space: Space) -> list[Block]:
    """A block per parameter or other stored tensor with dimensions, in the order of the arguments."""
    graph = space.graph
    simple = [keeps_dimensions(rule) for rule in rules_of(space)]
    parameters = frozenset([space.slot_of[value] for value in graph.inputs if graph.values[value].role is Role.PARAMETER])
    owner: dict[int, int] = {}
    blocks = []
    for value in graph.inputs:
        known = graph.values[value]
        slot = space.slot_of[value]
        if known.role in _STORED and known.shape and slot not in owner:
            block = _grow(space, slot, simple, parameters, owner)
            if len(block.slots) <= _LARGEST:
                blocks.append(block)
    return blocks


def rules_of(space: Space) -> list[OpRule]:
    """The rule of each kind of op."""
    by_id = {id(op.rule): op.rule for op in space.graph.ops}
    return [by_id[kind.rule] for kind in space.kinds]


def _grow(space: Space, start: int, simple: list[bool], known: frozenset[int], owner: dict[int, int]) -> Block:
    shape = space.shapes[start]
    owner[start] = start
    slots, pending, around = [start], [start], dict[int, None]()
    while pending and len(slots) <= _LARGEST:
        for index in space.neighbours[pending.pop()]:
            if index in around:
                continue
            around[index] = None
            if simple[space.kind_of[index]]:
                for slot in space.op_slots[index]:
                    if slot != NO_SLOT and slot not in owner and space.shapes[slot] == shape:
                        owner[slot] = start
                        slots.append(slot)
                        pending.append(slot)
    ops = tuple(sorted(around))
    members = frozenset(slots)
    parameters = known & members
    return Block(tuple(sorted(slots)), parameters, _copies(space, ops, parameters, members), ops)


def _copies(space: Space, ops: tuple[int, ...], parameters: frozenset[int], members: frozenset[int]) -> frozenset[int]:
    found = set(parameters)
    for index in ops:
        op = space.graph.ops[index]
        if op.primitive != "convert_element_type":
            continue
        operands = [space.slot_of[value] for value in op.operands if value != LITERAL and space.graph.values[value].shape]
        results = [space.slot_of[value] for value in op.results]
        if operands and found.issuperset(operands) and members.issuperset(results):
            found.update(results)
    return frozenset(found - parameters)


def settle_blocks(space: Space, state: list[int], fixed: set[int], blocks: list[Block]) -> bool:
    """Gives each block the cheapest of its moves; says whether any changed."""
    memo: dict[tuple[object, ...], dict[int, int]] = {}
    changed = False
    for block in blocks:
        if any(slot in fixed for slot in block.slots):
            continue
        places = {slot: place for place, slot in enumerate(block.slots)}
        key = _signature(space, state, block, places)
        best = memo.get(key)
        if best is None:
            best = memo[key] = _best_move(space, state, block)
        for slot, place in places.items():
            if place in best and state[slot] != best[place]:
                state[slot], changed = best[place], True
    return changed


def _signature(space: Space, state: list[int], block: Block, places: dict[int, int]) -> tuple[object, ...]:
    return tuple(
        [
            (space.kind_of[index], space.graph.ops[index].repeats, *[(places.get(slot, -1), state[slot]) for slot in space.op_slots[index]])
            for index in block.ops
        ]
    )


def _best_move(space: Space, state: list[int], block: Block) -> dict[int, int]:
    """Place of each slot that changes to the number of its new sharding."""
    before = [state[slot] for slot in block.slots]
    best: dict[int, int] = {}
    best_s = _seconds(space, state, block.ops)
    for number in options(space, state, block):
        for part in block.parts():
            for slot in part:
                state[slot] = number
            time_s = _seconds(space, state, block.ops)
            if time_s < best_s * (1 - 1e-6):
                best_s = time_s
                best = {place: number for place, slot in enumerate(block.slots) if state[slot] == number}
            for slot, old in zip(block.slots, before, strict=True):
                state[slot] = old
    return best


def _seconds(space: Space, state: list[int], ops: Sequence[int]) -> float:
    choose, all_ops = space.choose, space.graph.ops
    return sum([choose(index, state).time_s * all_ops[index].repeats for index in ops])


def options(space: Space, state: list[int], block: Block) -> list[int]:
    """Numbers of the shardings to try: those in the block, and each of them with more axes on some dimension."""
    found: dict[int, None] = dict.fromkeys(state[slot] for slot in block.slots)
    shape = space.shapes[block.slots[0]]
    for number in list(found):
        base = space.shardings[number]
        for extra in _free_axes(space, base):
            for longer in _extended(space, shape, base, extra):
                found[space.number(longer)] = None
    return list(found)


def _free_axes(space: Space, base: TensorSharding) -> Iterator[AxisNames]:
    used = {name for names in base for name in names}
    free = [name for name in space.mesh.names if name not in used]
    for count in range(len(free), 0, -1):
        yield from combinations(free, count)


def _extended(space: Space, shape: tuple[int, ...], base: TensorSharding, extra: AxisNames) -> Iterator[TensorSharding]:
    sizes = [size // space.mesh.num_slices(names) for size, names in zip(shape, base, strict=True)]
    parts = space.mesh.num_slices(extra)
    for dim in range(len(shape)):
        if sizes[dim] % parts == 0 and shape[dim] % space.mesh.num_slices(base[dim]) == 0:
            yield (*base[:dim], (*base[dim], *extra), *base[dim + 1 :])
