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
from spmdctx.search.recursive_shared import SharedPrice
from spmdctx.search.space import NO_SLOT, Space

_LARGEST = 400
_STORED = (Role.PARAMETER, Role.OPTIMIZER, Role.STATE)


class Block(NamedTuple):
    """Slots that are linked by element-wise ops and transposes.

    `orders` says per slot which dimension of the first one each of its dimensions is.
    `copies` are the slots that are made of parameters alone, `parameters` those of the parameters; `ops` are all ops around.
    """

    slots: tuple[int, ...]
    orders: dict[int, tuple[int, ...]]
    parameters: frozenset[int]
    copies: frozenset[int]
    ops: tuple[int, ...]

    def to_slot(self, space: Space, slot: int, base: TensorSharding) -> int:
        """The number of a slot's sharding for one of the block."""
        return space.number(tuple([base[dim] for dim in self.orders[slot]]))

    def to_base(self, slot: int, sharding: TensorSharding) -> TensorSharding:
        """The block's sharding for one of a slot."""
        found: list[AxisNames] = [()] * len(sharding)
        for dim, names in zip(self.orders[slot], sharding, strict=True):
            found[dim] = names
        return tuple(found)

    def parts(self) -> list[tuple[int, ...]]:
        """The sets of slots that may change together, the largest first."""
        kept = self.parameters | self.copies
        found = [self.slots, tuple([s for s in self.slots if s not in self.copies]), tuple([s for s in self.slots if s not in kept])]
        return [part for part in dict.fromkeys(found) if part]


def storage_blocks(space: Space) -> list[Block]:
    """A block per parameter or other stored tensor with dimensions, in the order of the arguments."""
    graph = space.graph
    simple = [keeps_dimensions(rule) or _transposes(rule) for rule in rules_of(space)]
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


def _transposes(rule: OpRule) -> bool:
    if not len(rule.operands) == len(rule.results) == 1:
        return False
    (operand,), (result,) = rule.operands, rule.results
    return sorted(operand) == sorted(result) and all(len(dims) == 1 for dims in operand) and len(set(operand)) == len(operand)


def _grow(space: Space, start: int, simple: list[bool], known: frozenset[int], owner: dict[int, int]) -> Block:
    owner[start] = start
    orders = {start: tuple(range(len(space.shapes[start])))}
    pending, around = [start], dict[int, None]()
    while pending and len(orders) <= _LARGEST:
        current = pending.pop()
        for index in space.neighbours[current]:
            if index in around:
                continue
            around[index] = None
            if simple[space.kind_of[index]]:
                for slot, order in _linked(space, index, current, orders[current]):
                    if slot not in owner:
                        owner[slot] = start
                        orders[slot] = order
                        pending.append(slot)
    ops = tuple(sorted(around))
    slots = (start, *sorted(slot for slot in orders if slot != start))
    parameters = known & frozenset(slots)
    return Block(slots, orders, parameters, _copies(space, ops, parameters, frozenset(slots)), ops)


def _linked(space: Space, index: int, current: int, order: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The other tensors of a simple op with the same dimensions, and the order of these."""
    rule, slots = space.graph.ops[index].rule, space.op_slots[index]
    sides = (*rule.operands, *rule.results)
    own = sides[slots.index(current)]
    for slot, dims in zip(slots, sides, strict=True):
        if slot == NO_SLOT or len(dims) != len(own) or not dims:
            continue
        if dims == own and space.shapes[slot] == space.shapes[current]:
            yield slot, order
        elif dims != own and sorted(dims) == sorted(own):
            yield slot, tuple([order[own.index(factors)] for factors in dims])


def _copies(space: Space, ops: tuple[int, ...], parameters: frozenset[int], members: frozenset[int]) -> frozenset[int]:
    found = set(parameters)
    for index in ops:
        op = space.graph.ops[index]
        if op.primitive not in ("convert_element_type", "transpose"):
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
    for base in options(space, state, block):
        for part in block.parts():
            for slot in part:
                state[slot] = block.to_slot(space, slot, base)
            time_s = _seconds(space, state, block.ops)
            if time_s < best_s * (1 - 1e-6):
                best_s = time_s
                best = {place: state[slot] for place, slot in enumerate(block.slots)}
            for slot, old in zip(block.slots, before, strict=True):
                state[slot] = old
    return best


def _seconds(space: Space, state: list[int], ops: Sequence[int]) -> float:
    choose, all_ops = space.choose, space.graph.ops
    return sum([choose(index, state).time_s * all_ops[index].repeats for index in ops])


def options(space: Space, state: list[int], block: Block) -> list[TensorSharding]:
    """The shardings to try: those in the block, and each of them with more axes on some dimension."""
    found = dict.fromkeys(block.to_base(slot, space.shardings[state[slot]]) for slot in block.slots)
    shape = space.shapes[block.slots[0]]
    for base in list(found):
        for extra in free_axes(space, base):
            found.update(dict.fromkeys(lengthened(space, shape, base, extra)))
    return list(found)


def free_axes(space: Space, base: TensorSharding) -> Iterator[AxisNames]:
    """Every set of axes that a sharding does not use, the largest first."""
    used = {name for names in base for name in names}
    free = [name for name in space.mesh.names if name not in used]
    for count in range(len(free), 0, -1):
        yield from combinations(free, count)


def lengthened(space: Space, shape: tuple[int, ...], base: TensorSharding, extra: AxisNames) -> Iterator[TensorSharding]:
    """A sharding with more axes on each dimension that they divide."""
    sizes = [size // space.mesh.num_slices(names) for size, names in zip(shape, base, strict=True)]
    parts = space.mesh.num_slices(extra)
    for dim in range(len(shape)):
        if sizes[dim] % parts == 0 and shape[dim] % space.mesh.num_slices(base[dim]) == 0:
            yield (*base[:dim], (*base[dim], *extra), *base[dim + 1 :])


def split_block(space: Space, state: list[int], block: Block) -> None:
    """Gives all of a block but its copies the cheapest of the shardings with the most slices."""
    kept = [slot for slot in block.slots if slot not in block.copies]
    base = block.to_base(kept[0], space.shardings[state[kept[0]]])
    shape = space.shapes[block.slots[0]]
    found = [longer for extra in free_axes(space, base) for longer in lengthened(space, shape, base, extra)]
    if not found:
        return
    most = max(space.mesh.num_slices(name for names in one for name in names) for one in found)
    best: tuple[float, list[int]] | None = None
    prices = SharedPrice(space)
    for one in found:
        if space.mesh.num_slices(name for names in one for name in names) == most:
            for slot in kept:
                state[slot] = block.to_slot(space, slot, one)
            time_s = prices.seconds(state, block.ops)
            if best is None or time_s < best[0]:
                best = time_s, [state[slot] for slot in kept]
    assert best is not None
    for slot, number in zip(kept, best[1], strict=True):
        state[slot] = number
