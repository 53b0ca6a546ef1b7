"""A program's ops and tensors as arrays: what is asked of every op is asked of each kind of op once, or of all ops at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from spmdctx.ir.arrays import BoolArray
from spmdctx.ir.graph import item_bytes
from spmdctx.ir.rule import OpRule


class Kind(NamedTuple):
    """What ops of one primitive, on tensors of the same shapes and with the same parameters, have in common."""

    primitive: str
    rule: OpRule
    flops: int


class Tensor(NamedTuple):
    """Shape and type of values."""

    shape: tuple[int, ...]
    dtype: str


class Columns:
    """Ops by their place in the order of execution, values by their number; a last value stands for literals.

    The slots of an op are its operands, then its results; those of all ops lie one behind the other.

    Attributes:
        kinds: those of the ops.
        kind_of: per op.
        repeats: per op.
        scopes: per op the computation that it belongs to.
        operands: per op.
        results: per op.
        elements: per value.
        sizes: bytes per value.
        item_bytes: per value.
        readers: per operand the op that reads it.
        read: per operand its value.
        makers: per result the op that makes it.
        made: per result its value.
        maker_of: per value its op, -1 for values that no op makes.
        slot_starts: per op its first slot, with an end behind the last op.
        slot_ops: per slot its op.
        slot_values: per slot its value.
        is_operand: per slot.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        kind_of: ArrayLike,
        places: tuple[ArrayLike, ArrayLike],
        operands: Sequence[tuple[int, ...]],
        results: Sequence[tuple[int, ...]],
        tensors: tuple[Sequence[Tensor], Sequence[int]],
    ) -> None:
        """`places` are `repeats` and `scopes`; `tensors` are what the values may be, and which of them each value is."""
        self.kinds, self.kind_of = kinds, np.array(kind_of, dtype=np.int64)
        self.repeats, self.scopes = (np.array(own, dtype=np.int64) for own in places)
        self.operands, self.results = operands, results
        self._measure(*tensors)
        self._lay_out(len(tensors[1]))

    def _measure(self, tensors: Sequence[Tensor], tensor_of: Sequence[int]) -> None:
        counts = np.array([*map(_count, tensors), 0], dtype=np.int64)
        widths = np.array([*[item_bytes(tensor.dtype) for tensor in tensors], 0], dtype=np.int64)
        which = np.array([*tensor_of, -1], dtype=np.int64)
        self.elements, self.item_bytes = counts[which], widths[which]
        self.sizes = self.elements * self.item_bytes

    def _lay_out(self, num_values: int) -> None:
        num_operands, num_results = (np.fromiter(map(len, own), dtype=np.int64, count=len(own)) for own in (self.operands, self.results))
        numbers = np.arange(len(num_operands))
        self.readers, self.makers = np.repeat(numbers, num_operands), np.repeat(numbers, num_results)
        self.read = np.fromiter(chain.from_iterable(self.operands), dtype=np.int64, count=len(self.readers))
        self.read[self.read < 0] = num_values
        self.made = np.fromiter(chain.from_iterable(self.results), dtype=np.int64, count=len(self.makers))
        self.maker_of = np.full(num_values + 1, -1, dtype=np.int64)
        self.maker_of[self.made] = self.makers
        ends = np.cumsum(num_operands + num_results)
        self.slot_starts = np.concatenate([[0], ends])
        self.slot_ops = np.repeat(numbers, num_operands + num_results)
        self.is_operand = np.arange(len(self.slot_ops)) < (self.slot_starts[:-1] + num_operands)[self.slot_ops]
        self.slot_values = np.empty(len(self.slot_ops), dtype=np.int64)
        self.slot_values[self.is_operand], self.slot_values[~self.is_operand] = self.read, self.made

    @property
    def num_ops(self) -> int:
        """Of the program."""
        return len(self.operands)

    @property
    def num_values(self) -> int:
        """Of the program, the one for literals not counted."""
        return len(self.elements) - 1

    def which(self, test: Callable[[str], bool]) -> BoolArray:
        """Per op whether its primitive passes a test."""
        passes: BoolArray = np.array([test(kind.primitive) for kind in self.kinds], dtype=bool)[self.kind_of]
        return passes

    def primitive(self, op: int) -> str:
        """Of one op."""
        return self.kinds[int(self.kind_of[op])].primitive

    def have_result(self, is_such: BoolArray) -> BoolArray:
        """Per op whether one of its results is such a value."""
        return np.bincount(self.makers[is_such[self.made]], minlength=self.num_ops) > 0


def _count(tensor: Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count
