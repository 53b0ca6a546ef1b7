"""XLA on GPU keeps a hyperbolic tangent of 16 bits that several fusions read, rather than compute it again.

What XLA does: it fuses an op into all of its readers where it expects less time of that. A tanh or an erf is computed in float32, which
    takes longer than two bytes an element take to be written and read once; so it stays where two fusions need it. A GELU is the case: the
    activation and its gradient read the same tanh, which then lives from the forward to the backward pass. What is made of the tanh alone,
    and is all that others read, stays in its place.
Seen in: CUDA plugin 0.10.2 for H100: tanh and erf in bfloat16 and float16, and in float32 of a bfloat16 product, 512 to 65536 rows, with
    checkpoints and without. Not kept: tanh in float32, logistic, softplus. An erf in float32 is kept beyond 32 MiB (not counted here).
    Stages of a recomputed bfloat16 network of GELUs were planned at 0.80 to 0.88 of the compiled peaks without this.
Switch: none: a property of compilers that follows from other switches
Priced by: trace.build.compiled marks such values as being in memory.
Written or prevented by: nothing
Checked by: tests/machine/xla/kept/test_shared_tanh.py
"""

from __future__ import annotations

import numpy as np

from spmdctx.ir.analysis.columns import Columns
from spmdctx.ir.arrays import BoolArray
from spmdctx.machine.xla.fusion import CHAINED

_LONG = ("tanh", "erf", "erfc")
_ITEM_BYTES = 2


def shared_tanh(columns: Columns, materialized: BoolArray) -> list[int]:
    """Returns the values that several fusions read, and that XLA does not compute again in each of them.

    Args:
        columns: The columns of the step.
        materialized: For each value, whether it is in memory; a last False stands for literals.
    """
    ops = np.flatnonzero(columns.which(_LONG.__contains__)).tolist()
    if not ops:
        return []
    readers = _Readers(columns, materialized)
    values = [columns.results[op][0] for op in ops]
    shared = [readers.shared(value) for value in values if not materialized[value] and readers.is_narrow(value)]
    return [value for value in shared if value is not None]


class _Readers:
    def __init__(self, columns: Columns, materialized: BoolArray) -> None:
        self.columns, self.materialized = columns, materialized
        self.chained = columns.which(CHAINED.__contains__)
        self.order = np.argsort(columns.read, kind="stable")
        self.sorted = columns.read[self.order]

    def shared(self, value: int) -> int | None:
        """Returns the last value that all that is made of `value` goes through, None if it ends in a single fusion."""
        ends, seen, left, last = set[int](), {value}, [value], value
        while left:
            left.sort(key=lambda other: -int(self.columns.maker_of[other]))
            earliest = left.pop()
            if not (left or ends):
                last = earliest
            for op in self._readers(earliest):
                result = self.columns.results[op][0]
                if not self.chained[op] or self.materialized[result]:
                    ends.add(result)
                elif result not in seen:
                    seen.add(result)
                    left.append(result)
        return last if len(ends) > 1 else None

    def is_narrow(self, value: int) -> bool:
        """Returns whether a value of its size in memory, from which a chain computes it, has 16 bits an element."""
        columns, seen, left = self.columns, {value}, [value]
        while left:
            maker = int(columns.maker_of[left.pop()])
            for operand in columns.operands[maker]:
                if operand < 0 or operand in seen or columns.elements[operand] < columns.elements[value]:
                    continue
                seen.add(operand)
                if not self.materialized[operand]:
                    left.append(operand)
                elif columns.item_bytes[operand] == _ITEM_BYTES:
                    return True
        return False

    def _readers(self, value: int) -> list[int]:
        first, last = np.searchsorted(self.sorted, [value, value + 1])
        return [int(op) for op in self.columns.readers[self.order[first:last]]]
