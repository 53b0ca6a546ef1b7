"""XLA on GPU fuses the reduction of a row with what reads the row and its reduction, and writes the result beside the row.

What XLA does: a softmax and a normalization read every row twice: for its maximum or sum, and element by element. Where the very value
    that is reduced is read element by element, XLA makes one kernel of both, which reduces a row and then goes over it once more. Other
    element-wise ops behind it and their reductions join the kernel. A fusion may write over an operand only if it reads it element by
    element alone. So the result gets memory of its own, although nothing reads the operand later. A gradient that is multiplied by another
    value before it is reduced makes two kernels, of which the second writes over what it reads.
Seen in: CUDA plugin 0.10.2 for H100: in the backward pass of attention that computes its softmax again, the scores, the cotangents of the
    softmax and of the scores are in memory at once; where the softmax is kept, the last two share memory.
Switch: none: a property of compilers that follows from other switches
Priced by: cost.memory.lives ends no life early there.
Written or prevented by: nothing
Checked by: tests/machine/xla/test_row_fusions.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import BOUNDARY_OF, HEAVY
from spmdctx.ir.rule import FactorKind

_NOTHING: frozenset[int] = frozenset()


def read_with_their_rows(graph: Graph, materialized: Sequence[int]) -> Mapping[int, frozenset[int]]:
    """Returns, by op, the values in memory that its fusion reads both element by element and as reductions of their rows.

    Args:
        graph: the step.
        materialized: for each value, whether it exists in memory.
    """
    fusions = _Fusions(graph, materialized)
    found = {}
    for op in graph.ops:
        if len(op.results) == 1 and op.primitive not in HEAVY and op.primitive not in BOUNDARY_OF:
            both = fusions.add(op)
            if both:
                found[op.id] = both
    return found


class _Fusions:
    """What values are made from inside of fusions: values in memory element by element, and reductions of rows of such values.

    `_of_rows` has values with one element for each row, which a fusion computes again where it needs them. `_base` has the one value of
    which another is a function, element by element, and `_reduced` those of which rows were reduced. `_joined` has values whose fusion
    is one kernel with a reduction.
    """

    def __init__(self, graph: Graph, materialized: Sequence[int]) -> None:
        self._graph, self._materialized = graph, materialized
        self._elements: dict[int, frozenset[int]] = {}
        self._rows: dict[int, frozenset[int]] = {}
        self._of_rows: set[int] = set()
        self._base: dict[int, int] = {}
        self._reduced: dict[int, frozenset[int]] = {}
        self._joined: set[int] = set()

    def add(self, op: Op) -> frozenset[int]:
        """Adds the result of an op; returns what the op's fusion reads in both ways."""
        (result,), arrays = op.results, [value for value in op.operands if value != LITERAL]
        rows = _NOTHING.union(*(self._rows.get(value, _NOTHING) for value in arrays))
        self._reduced[result] = _NOTHING.union(*(self._reduced.get(value, _NOTHING) for value in arrays))
        if _reduces_rows(op):
            self._of_rows.add(result)
            self._rows[result] = rows.union(*map(self._read, arrays))
            self._reduced[result] = frozenset(self._base.get(value, value) for value in arrays)
        elif all(kind is FactorKind.PASS_THROUGH for kind in op.rule.kinds):
            size = self._size(result)
            same = [value for value in arrays if self._size(value) == size]
            if same and self._of_rows.issuperset(same):
                self._of_rows.add(result)
                self._rows[result] = rows
                return _NOTHING
            whole = [value for value in same if value not in self._of_rows and self._read(value)]
            read, is_joined = _NOTHING.union(*map(self._read, whole)), self._joins(result, arrays, whole)
            if not self._materialized[result]:
                self._elements[result], self._rows[result] = read, rows
                if is_joined:
                    self._joined.add(result)
            return read & rows if is_joined else _NOTHING
        return _NOTHING

    def _joins(self, result: int, arrays: Sequence[int], whole: Sequence[int]) -> bool:
        """Returns whether the fusion of a value is one kernel with a reduction; notes of which value this one is a function.

        Args:
            result: the value.
            arrays: what it is made of.
            whole: those of them that have its size, and more than one element for each row.
        """
        bases = {self._base.get(value, value) for value in whole}
        beside = [self._reduced.get(value, _NOTHING) for value in arrays if value not in whole]
        if len(bases) == 1 and not any(beside) and not self._materialized[result]:
            self._base[result] = next(iter(bases))
        return not self._joined.isdisjoint(whole) or (len(bases) == 1 and any(reduced == bases for reduced in beside))

    def _read(self, value: int) -> frozenset[int]:
        """Returns the values in memory that a fusion reads for a value."""
        return frozenset({value}) if self._materialized[value] else self._elements.get(value, _NOTHING)

    def _size(self, value: int) -> int:
        return math.prod(self._graph.values[value].shape)


def _reduces_rows(op: Op) -> bool:
    """Returns whether an op reduces the last dimension of its operand, and nothing else."""
    rule = op.rule
    if not op.primitive.startswith("reduce_") or not rule.operands or not rule.operands[0]:
        return False
    last, kinds = rule.operands[0][-1], rule.kinds
    reduced = {factor for factor, kind in enumerate(kinds) if kind is not FactorKind.PASS_THROUGH}
    return bool(reduced) and reduced == set(last)
