"""The folded program as a graph of its own, on which the rounds run: one op per class of ops, one value per class of slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spmdctx.ir.graph import LITERAL, Graph, Role, Value
from spmdctx.search.problem.fold import Fold
from spmdctx.search.problem.space import NO_SLOT, Space
from spmdctx.search.recursive.rounds import Inputs, Roots, backward_products, main_ops
from spmdctx.search.setup.request import Setup


@dataclass(frozen=True, slots=True)
class Folded:
    """A program folded by its repeated layers.

    Attributes:
        graph: one op per class. A value may have several producers, as a loop's carry does.
        from_literals: its values that depend on no input.
        members: per op of the graph, the ops of the program that it stands for, in order.
        value_of: slot of the program to value of the graph.
        followers: ops of the graph that are backward products.
        inputs: the kinds of the main ops' operands.
    """

    graph: Graph
    from_literals: frozenset[int]
    members: list[list[int]]
    value_of: dict[int, int]
    followers: frozenset[int]
    inputs: dict[int, Inputs]

    def setup(self, setup: Setup, space: Space) -> Setup:
        """Translates the pins, seeds and directions of a set-up to the folded graph."""
        op_of = {members[0]: index for index, members in enumerate(self.members)}
        pins, seeds = (
            {self.value_of[slot]: sharding for value, sharding in given.items() if (slot := space.slot_of[value]) in self.value_of}
            for given in (setup.pins, setup.seeds)
        )
        forced = {op_of[index]: axes for index, axes in setup.forced.items() if index in op_of}
        one_way = {op_of[index]: forward for index, forward in setup.one_way.items() if index in op_of}
        return replace(setup, pins=pins, seeds=seeds, forced=forced, one_way=one_way)


def folded_program(space: Space, found: Fold) -> Folded:
    """Returns the graph of a fold; each class has its first member's shapes and rule, and the sum of all members' repeats."""
    value_of = {slot: number for number, own in enumerate(found.slot_members) for slot in own}
    values = [_value(space, number, own[0], Role.INTERMEDIATE) for number, own in enumerate(found.slot_members)]
    inputs: dict[int, None] = {}
    for value in space.graph.inputs:
        number = value_of.get(space.slot_of[value], -1)
        if number >= 0 and number not in inputs:
            inputs[number] = None
            values[number] = _value(space, number, value, space.graph.values[value].role)
    from_literals: dict[int, int] = {}
    ops = []
    for index, own in enumerate(found.op_members):
        op, slots = space.graph.ops[own[0]], space.op_slots[own[0]]
        for slot in slots:
            if slot != NO_SLOT and slot not in value_of and slot not in from_literals:
                from_literals[slot] = len(values)
                values.append(_value(space, len(values), slot, Role.INTERMEDIATE))
        ids = [LITERAL if slot == NO_SLOT else value_of.get(slot, from_literals.get(slot, LITERAL)) for slot in slots]
        count = len(op.operands)
        ops.append(
            op._replace(id=index, operands=tuple(ids[:count]), results=tuple(ids[count:]), repeats=op.repeats * len(own), pinned=None)
        )
    graph = Graph(tuple(values), tuple(ops), tuple(inputs), (), (), space.graph.origins, space.graph.fingerprint)
    followers, roots = backward_products(space.graph), Roots(space.graph)
    return Folded(
        graph,
        frozenset(from_literals.values()),
        found.op_members,
        value_of,
        frozenset([index for index, own in enumerate(found.op_members) if own[0] in followers]),
        {index: roots.inputs(space.graph.ops[found.op_members[index][0]]) for index in main_ops(graph)},
    )


def _value(space: Space, number: int, source: int, role: Role) -> Value:
    known = space.graph.values[source]
    return Value(number, known.shape, known.dtype, role, known.path)
