"""The folded program as a graph of its own: one op per class, one value per class of slots, repeats counted in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spmdctx.ir import LITERAL, Graph, Op, Role, Value
from spmdctx.search.fold import Fold, fold
from spmdctx.search.modes import Setup
from spmdctx.search.recursive_rounds import Inputs, Roots, backward_products, main_ops
from spmdctx.search.recursive_storage import storage_blocks
from spmdctx.search.space import NO_SLOT, Space


@dataclass(frozen=True, slots=True)
class Folded:
    """A program folded by its repeated layers.

    Attributes:
        graph: one op per class. A value may have several producers, as a loop's carry does.
        loose: its values that depend on no input.
        members: per op of the graph those that it stands for, in order.
        value_of: slot of the program to value of the graph.
        followers: ops of the graph that are backward products.
        inputs: what the operands of the main ops are.
    """

    graph: Graph
    loose: frozenset[int]
    members: list[list[int]]
    value_of: dict[int, int]
    followers: frozenset[int]
    inputs: dict[int, Inputs]

    def setup(self, setup: Setup, space: Space) -> Setup:
        """The same pins, seeds and directions for the folded graph."""
        op_of = {members[0]: index for index, members in enumerate(self.members)}
        pins, seeds = (
            {self.value_of[slot]: sharding for value, sharding in given.items() if (slot := space.slot_of[value]) in self.value_of}
            for given in (setup.pins, setup.seeds)
        )
        forced = {op_of[index]: axes for index, axes in setup.forced.items() if index in op_of}
        one_way = {op_of[index]: forward for index, forward in setup.one_way.items() if index in op_of}
        return replace(setup, pins=pins, seeds=seeds, forced=forced, one_way=one_way)


def fold_program(space: Space, setup: Setup) -> Folded:
    """Folds a program; pins, seeds and forced axes of `setup` tell ops and slots apart that are otherwise alike."""
    op_marks, slot_marks = _marks(space, setup)
    members, slot_members = _split(space, fold(space, op_marks, slot_marks))
    value_of = {slot: number for number, own in enumerate(slot_members) for slot in own}
    values = [_value(space, number, own[0], Role.INTERMEDIATE) for number, own in enumerate(slot_members)]
    inputs: dict[int, None] = {}
    for value in space.graph.inputs:
        number = value_of.get(space.slot_of[value], -1)
        if number >= 0 and number not in inputs:
            inputs[number] = None
            values[number] = _value(space, number, value, space.graph.values[value].role)
    loose: dict[int, int] = {}
    ops = []
    for index, own in enumerate(members):
        op, slots = space.graph.ops[own[0]], space.op_slots[own[0]]
        for slot in slots:
            if slot != NO_SLOT and slot not in value_of and slot not in loose:
                loose[slot] = len(values)
                values.append(_value(space, len(values), slot, Role.INTERMEDIATE))
        ids = [LITERAL if slot == NO_SLOT else value_of.get(slot, loose.get(slot, LITERAL)) for slot in slots]
        count = len(op.operands)
        ops.append(
            Op(index, op.primitive, tuple(ids[:count]), tuple(ids[count:]), op.rule, op.flops, op.repeats * len(own), fused=op.fused)
        )
    graph = Graph(tuple(values), tuple(ops), tuple(inputs), (), (), space.graph.origins, space.graph.fingerprint)
    followers, roots = backward_products(space.graph), Roots(space.graph)
    return Folded(
        graph,
        frozenset(loose.values()),
        members,
        value_of,
        frozenset([index for index, own in enumerate(members) if own[0] in followers]),
        {index: roots.inputs(space.graph.ops[members[index][0]]) for index in main_ops(graph)},
    )


def _split(space: Space, found: Fold) -> tuple[list[list[int]], list[list[int]]]:
    """Members of each class of ops and slots, where the optimizer's values are told apart by the class of their parameter.

    In the middle of a long update all parameters of one shape look alike, but each wants its own sharding.
    """
    parameter = [-1] * len(space.shapes)
    for block in storage_blocks(space):
        own = found.slot_class[block.slots[0]]
        for slot in block.slots:
            parameter[slot] = own
    slots: dict[tuple[int, int], list[int]] = {}
    number_of = [-1] * (len(space.shapes) + 1)
    numbers: dict[tuple[int, int], int] = {}
    for class_members in found.slot_members:
        for slot in class_members:
            key = (found.slot_class[slot], parameter[slot])
            number_of[slot] = numbers.setdefault(key, len(numbers))
            slots.setdefault(key, []).append(slot)
    ops: dict[tuple[int, ...], list[int]] = {}
    for class_members in found.op_members:
        for index in class_members:
            ops.setdefault((found.op_class[index], *map(number_of.__getitem__, space.op_slots[index])), []).append(index)
    return sorted(ops.values()), list(slots.values())


def _value(space: Space, number: int, source: int, role: Role) -> Value:
    known = space.graph.values[source]
    return Value(number, known.shape, known.dtype, role, known.path)


def _marks(space: Space, setup: Setup) -> tuple[list[int], dict[int, int]]:
    op_marks = [0] * len(space.graph.ops)
    numbers: dict[object, int] = {}
    for index, forward in setup.one_way.items():
        op_marks[index] = 1 + forward
    for index, axes in setup.forced.items():
        op_marks[index] = 3 + numbers.setdefault(axes, len(numbers))
    slot_marks: dict[int, int] = {}
    for given, kind in ((setup.seeds, "seed"), (setup.pins, "pin")):
        for value, sharding in given.items():
            slot_marks[space.slot_of[value]] = 1 + numbers.setdefault((kind, sharding), len(numbers))
    for value in space.graph.inputs:
        # What the optimizer reads is no parameter, however alike it is.
        role = numbers.setdefault((space.graph.values[value].role, slot_marks.get(space.slot_of[value], 0)), len(numbers))
        slot_marks[space.slot_of[value]] = 1 + role
    return op_marks, slot_marks
