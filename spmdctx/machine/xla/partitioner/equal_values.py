"""The partitioner merges equal values, and gives one reader the sharding that another asks for.

What XLA does: it merges equal equations before it splits anything. It hands the sharding that one reader asks for on to all others that
    have no constraint between them and the value. A first power, as in Adam's first moment, is equal to its operand. XLA writes values
    that depend on no input once for each reader, unless they are constrained. Values that differ by a transpose alone it merges too: a
    table of tokens that is converted for the look-up, and turned and converted for the logits, is one value.
Seen in: Shardy, jax 0.10.2, v5e:2x4 (libtpu 0.0.42): in 120 plans, 80 of them of random pins, 3534 MiB of collectives that no plan had
    became 246. Five random plans of a Llama for 8 x H100: 156 MiB became none. A turned table: 1,070 MiB in a mixture with tied embeddings,
    and seven copies and one more reduction of the table (5.9 of 22.4 ms of a GPT-2 of two layers), whose gradient was constrained
    between two transposes.
Switch: none: all backends
Priced by: nothing
Written or prevented by: lowering.rewrite.values notes the values; lowering.rewrite.rewriter constrains all of them.
Checked by: tests/machine/xla/partitioner/test_equal_values.py, benchmarks/fidelity_plans.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import IDENTITIES
from spmdctx.ir.projection import project
from spmdctx.ir.sharding import Assignment, AxisNames, TensorSharding
from spmdctx.rules.elementwise import ELEMENTWISE

_REPEATED = ELEMENTWISE | {"iota", "broadcast_in_dim", "slice"}
"""Ops that the partitioner writes again for each reader, if they depend on no input."""

WRITTEN_AGAIN = _REPEATED | {"transpose", "squeeze", "reshape", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
"""Ops that the rewriter writes again for readers that take what depends on no input otherwise than it is stored."""

_NAMES_AGAIN = frozenset({*IDENTITIES, "transpose"})
"""Ops whose result is another name of their operand, at most turned."""

_Dim = TypeVar("_Dim")

_MAYBE_ITS_OPERAND = frozenset({"copy", "name", "integer_pow"})
"""Ops that may be no more than another name of their operand; the first power is, as in Adam's first moment."""


def moved_values(ops: Iterable[Op], assignment: Assignment) -> frozenset[int]:
    """Returns the values that some op takes, or passes on, in another sharding than that in which they are stored."""
    found = set()
    for op in ops:
        axes = assignment.ops[op.id].axes
        for value, dims in zip(op.operands, op.rule.operands, strict=True):
            if value != LITERAL and project(dims, axes) != assignment.values[value]:
                found.add(value)
        first = op.operands[0] if op.primitive in IDENTITIES else LITERAL
        if first != LITERAL and assignment.values[op.results[0]] != assignment.values[first]:
            found.add(first)
    return frozenset(found)


def equal_values(graph: Graph, scopes: Sequence[int], assignment: Assignment, moved: Collection[int]) -> frozenset[int]:
    """Returns the values that the compiler merges, if one of them is `moved` or stored otherwise than another.

    All of them are constrained. Otherwise the readers of one would get the sharding of the other, and move it back.
    """
    names = _Names(graph, assignment)
    alike: dict[tuple[object, ...], list[int]] = {}
    for op in graph.ops:
        if len(op.results) != 1 or all(value == LITERAL for value in op.operands):
            continue
        (made,) = op.results
        if op.primitive in _MAYBE_ITS_OPERAND:
            alike.setdefault(("its operand", op.operands[0]), [op.operands[0]]).append(made)
        key = names.key(op)
        if key is None:
            continue
        known = alike.setdefault((scopes[op.id], *key), [])
        known.append(made)
        names.join(made, known)
    found: set[int] = set()
    for group in alike.values():
        if len(group) > 1 and (len({names.stored(one) for one in group}) > 1 or any(one in moved for one in group)):
            found.update(group)
            # A constraint on what was turned keeps the two apart. Behind an equal value alone it would be a second one on that.
            found.update(turned for one in group for turned in names.turned[one])
    return frozenset(found)


class _Names:
    """Names values so that equal ones have one name: the first value that is equal to it and stored alike, and how that is turned."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self._graph, self._assignment = graph, assignment
        self._first = [*range(len(graph.values)), LITERAL]
        # By value, for each of its dimensions that of the value it is named after; None where they are the same.
        self._turns: list[tuple[int, ...] | None] = [None] * len(self._first)
        self.turned: list[frozenset[int]] = [frozenset()] * len(self._first)

    def key(self, op: Op) -> tuple[object, ...] | None:
        """Returns what ops that make equal values have in common; None where a value is named after the operand."""
        (made,) = op.results
        axes, value = self._assignment.ops[op.id].axes, self._graph.values[made]
        if op.primitive in _NAMES_AGAIN and op.operands[0] != LITERAL and self._is_left_in_place(op, axes):
            self._name_after(op)
            return None
        operands, shape, split = tuple(map(self._first.__getitem__, op.operands)), value.shape, axes
        turns = {self._turns[one] for one in op.operands}
        if turns != {None}:
            turns = {self._turns[one] for one in op.operands if one != LITERAL and self._graph.values[one].shape}
            if len(turns) > 1 or op.primitive not in ELEMENTWISE:
                operands = op.operands
            else:
                (self._turns[made],) = turns
                self.turned[made] = frozenset().union(*map(self.turned.__getitem__, op.operands))
        if op.primitive in ELEMENTWISE:
            shape, split = self._turned_back(made, shape), self._turned_back(made, project(op.rule.results[0], axes))
        return op.primitive, *operands, shape, value.dtype, split

    def join(self, made: int, known: Sequence[int]) -> None:
        """Names a value after the first of those that are equal to it, itself included, that is stored alike."""
        self._first[made] = next(one for one in known if self.stored(one) == self.stored(made))

    def stored(self, value: int) -> TensorSharding:
        """Returns how a value is stored, turned back."""
        return self._turned_back(value, self._assignment.values[value])

    def _is_left_in_place(self, op: Op, axes: tuple[AxisNames, ...]) -> bool:
        """Returns whether an op that at most turns its operand moves nothing between devices, and tells dimensions apart."""
        (before,), (after,), stored = op.rule.operands, op.rule.results, self._assignment.values
        if op.primitive == "transpose" and len(set(before)) < len(before):
            return False
        return (project(before, axes), project(after, axes)) == (stored[op.operands[0]], stored[op.results[0]])

    def _name_after(self, op: Op) -> None:
        (source, *_), (made,), (dims,) = op.operands, op.results, op.rule.results
        self._first[made], self._turns[made], self.turned[made] = self._first[source], self._turns[source], self.turned[source]
        if op.primitive == "transpose":
            turn, before = tuple(map(op.rule.operands[0].index, dims)), self._turns[source]
            turn = turn if before is None else tuple(before[dim] for dim in turn)
            is_turned = turn != tuple(range(len(turn)))
            self._turns[made], self.turned[made] = (turn, frozenset({made})) if is_turned else (None, frozenset())

    def _turned_back(self, value: int, dims: tuple[_Dim, ...]) -> tuple[_Dim, ...]:
        turn = self._turns[value]
        return dims if turn is None else tuple(dims[turn.index(dim)] for dim in range(len(dims)))


def free_values(graph: Graph, from_literals: Collection[int], moved: Collection[int]) -> frozenset[int]:
    """Returns the `from_literals` values, which depend on no input, that each reader gets in the sharding that it asks for.

    A constraint would make one tensor of such a value, which readers that want other splits would have to move.
    """
    if not from_literals:
        return frozenset()
    found: set[int] = {LITERAL}
    for op in graph.ops:
        if op.primitive in _REPEATED and found.issuperset(op.operands):
            found.update(value for value in op.results if value in from_literals and value not in moved)
    return frozenset(found - {LITERAL})


def turned_products(graph: Graph, assignment: Assignment) -> frozenset[int]:
    """Returns the matrix products that only a transpose reads, in the sharding in which they are stored, and those turned once more.

    They are constrained behind the last transpose. Otherwise the compiler would make them before it, reduced or not. It would then copy a
    gradient, or all that is added to it, from one layout to another: of a table that makes logits, too, also the table and its moments.
    """
    found = set[int]()
    for op in graph.ops:
        if op.primitive == "dot_general":
            left = [op.results[0]]
            while turned := _turned_in_place(graph, assignment, left[-1]):
                found.update((left[-1], *turned[:-1]))
                left = turned
    return frozenset(found)


def _turned_in_place(graph: Graph, assignment: Assignment, value: int) -> list[int]:
    """Returns what the transpose makes that alone reads a value, be it in another type, and moves nothing; nothing if there is none."""
    made = _made_in_place(graph, assignment, value, "transpose")
    if made == LITERAL and (cast := _made_in_place(graph, assignment, value, "convert_element_type")) != LITERAL:
        made = _made_in_place(graph, assignment, cast, "transpose")
        return [cast, made] if made != LITERAL else []
    return [made] if made != LITERAL else []


def _made_in_place(graph: Graph, assignment: Assignment, value: int, primitive: str) -> int:
    """Returns what the op of a primitive makes that alone reads a value, as it is stored; `LITERAL` if there is none."""
    after = graph.readers[value] if value not in graph.outputs else ()
    if len(after) != 1 or after[0].primitive != primitive:
        return LITERAL
    rule, axes, (made,) = after[0].rule, assignment.ops[after[0].id].axes, after[0].results
    is_turned = primitive != "transpose" or rule.operands != rule.results
    pairs = (value, rule.operands[0]), (made, rule.results[0])
    return made if is_turned and all(project(dims, axes) == assignment.values[own] for own, dims in pairs) else LITERAL
