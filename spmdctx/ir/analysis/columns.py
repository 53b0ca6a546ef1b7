"""A program's ops and tensors as arrays, so that a question is asked once per kind of op, or of all ops at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from spmdctx.errors import UnsupportedError
from spmdctx.ir.arrays import BoolArray
from spmdctx.ir.graph import item_bytes
from spmdctx.ir.rule import OpRule

_MOST_BYTES = 2**60
"""What a tensor may have, so that sums of them are numbers of 64 bits."""


class Kind(NamedTuple):
    """The properties that ops of one primitive share, if their tensors have the same shapes and their parameters are equal.

    `parts` is True for a pad that puts the elements of its operand apart.
    """

    primitive: str
    rule: OpRule
    flops: int
    parts: bool = False


class Tensor(NamedTuple):
    """The shape and the type of values."""

    shape: tuple[int, ...]
    dtype: str


class Columns:
    """Ops by their place in the order of execution, values by their number; a last value stands for literals.

    The slots of an op are its operands, then its results. The slots of all ops lie one behind the other.

    Attributes:
        kinds: The kinds of the ops.
        kind_of: The kind of each op, as a place in `kinds`.
        repeats: The executions of each op in a step.
        scopes: The computation to which each op belongs.
        operands: The values that each op reads.
        results: The values that each op makes.
        elements: The number of elements of each value.
        sizes: The bytes of each value.
        item_bytes: The bytes of one element of each value.
        readers: The op that reads each operand.
        read: The value of each operand.
        makers: The op that makes each result.
        made: The value of each result.
        maker_of: The op that makes each value, -1 for values that no op makes.
        slot_starts: The first slot of each op, with an end behind the last op.
        slot_ops: The op of each slot.
        slot_values: The value of each slot.
        is_operand: True for each slot of an operand.
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
        """Lays out a program; `places` are `repeats` and `scopes`, `tensors` the distinct tensors and the number of each value's own.

        Raises:
            UnsupportedError: a tensor of more than 2**60 bytes.
        """
        self.kinds, self.kind_of = kinds, np.array(kind_of, dtype=np.int64)
        self.repeats, self.scopes = (np.array(own, dtype=np.int64) for own in places)
        self.operands, self.results = operands, results
        self._measure(*tensors)
        self._lay_out(len(tensors[1]))

    def _measure(self, tensors: Sequence[Tensor], tensor_of: Sequence[int]) -> None:
        largest = max(tensors, key=_bytes, default=None)
        if largest is not None and _bytes(largest) > _MOST_BYTES:
            raise UnsupportedError("A tensor of the step has more than 2**60 bytes.", got=f"{largest.dtype}{list(largest.shape)}")
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
        """The number of ops of the program."""
        return len(self.operands)

    @property
    def num_values(self) -> int:
        """The number of values of the program, without the one for literals."""
        return len(self.elements) - 1

    def which(self, test: Callable[[str], bool]) -> BoolArray:
        """Returns for each op whether its primitive passes a test."""
        passes: BoolArray = np.array([test(kind.primitive) for kind in self.kinds], dtype=bool)[self.kind_of]
        return passes

    @property
    def parting(self) -> BoolArray:
        """Returns for each op whether it puts the elements of its operand apart."""
        parts: BoolArray = np.array([kind.parts for kind in self.kinds], dtype=bool)[self.kind_of]
        return parts

    def primitive(self, op: int) -> str:
        """Returns the primitive of one op."""
        return self.kinds[int(self.kind_of[op])].primitive

    def have_result(self, is_such: BoolArray) -> BoolArray:
        """Returns for each op whether one of its results is a value marked in `is_such`."""
        return np.bincount(self.makers[is_such[self.made]], minlength=self.num_ops) > 0


def _bytes(tensor: Tensor) -> int:
    return _count(tensor) * item_bytes(tensor.dtype)


def _count(tensor: Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count
