"""Predicted seconds in which a reshard is paid once however many ops read its result, as the compiler merges equal ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spmdctx.ir import LITERAL
from spmdctx.search.space import NO_SLOT, Space
from spmdctx.search.transfer import project


class _Reads(NamedTuple):
    """Seconds of an op, and its operands that are resharded: position, number of the sharding, seconds."""

    time_s: float
    moved: tuple[tuple[int, int, float], ...]


class SharedPrice:
    """Prices sets of ops of one space."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._memo: dict[tuple[int, ...], _Reads] = {}

    def seconds(self, state: list[int], ops: Iterable[int]) -> float:
        """Predicted seconds per step of some ops in a state."""
        space = self._space
        total = 0.0
        paid: dict[tuple[int, int], float] = {}
        for index in ops:
            key = space.key(index, state)
            reads = self._memo.get(key)
            if reads is None:
                reads = self._memo[key] = self._reads(index, state)
            repeats = space.graph.ops[index].repeats
            total += reads.time_s * repeats
            for position, number, time_s in reads.moved:
                spent = time_s * repeats
                place = (space.op_slots[index][position], number)
                known = paid.get(place, 0.0)
                total -= min(known, spent)
                paid[place] = max(known, spent)
        return total

    def _reads(self, index: int, state: list[int]) -> _Reads:
        space, op = self._space, self._space.graph.ops[index]
        choice = space.choose(index, state)
        moved = []
        for position, (value, dims) in enumerate(zip(op.operands, op.rule.operands, strict=True)):
            slot = space.op_slots[index][position]
            if value == LITERAL or slot == NO_SLOT or slot in space.loose_slots:
                continue
            wanted = project(dims, choice.axes)
            stored = space.shardings[state[slot]]
            if wanted != stored:
                moved.append((position, space.number(wanted), space.reshard_s(value, stored, wanted)))
        return _Reads(choice.time_s, tuple([row for row in moved if row[2] > 0.0]))
