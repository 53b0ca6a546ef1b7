"""Sums that a loop only adds up: where the compiler reduces them once, after the loop, and not in each of its turns."""

from __future__ import annotations

import math

from spmdctx.ir import LITERAL, Graph, Op

_LAYOUT = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy"})
_ADDITIONS = frozenset({"add", "add_any"})
_CARRIED = "scan.next"
_ENTERING = "scan.enter"


def accumulated_sums(graph: Graph) -> dict[int, int]:
    """Value to how often its reduction runs in a step, for results of loop bodies that go nowhere but into a carried sum.

    XLA moves the all_reduce of such a result behind the loop (`while-loop-all-reduce-code-motion`) on TPU and GPU.
    """
    return _Finder(graph).find()


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._readers: dict[int, list[Op]] = {}
        for op in graph.ops:
            for value in op.operands:
                if value != LITERAL:
                    self._readers.setdefault(value, []).append(op)
        self._before = {after: before for before, after in graph.ties}
        self._outputs = frozenset(graph.outputs)

    def find(self) -> dict[int, int]:
        found = {}
        for op in self._graph.ops:
            if op.repeats > 1 and len(op.results) == 1:
                turns = self._turns(op.results[0])
                if turns:
                    found[op.results[0]] = op.repeats // turns
        return found

    def _turns(self, value: int) -> int:
        """Turns of the loop whose carry a value is added to, 0 where anything else reads it."""
        while True:
            reader = self._only_reader(value)
            if reader is None:
                return 0
            if reader.primitive in _ADDITIONS:
                return self._added(reader, value)
            if not self._keeps(reader):
                return 0
            value = reader.results[0]

    def _keeps(self, op: Op) -> bool:
        """Whether an op hands on what it reads: a sum over dimensions of size 1, as the gradient of a bias has one, does too."""
        if op.primitive != "reduce_sum":
            return op.primitive in _LAYOUT
        before, after = (math.prod(self._graph.values[value].shape) for value in (op.operands[0], op.results[0]))
        return before == after

    def _only_reader(self, value: int) -> Op | None:
        readers = self._readers.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self._outputs else None

    def _added(self, op: Op, term: int) -> int:
        """Turns of the loop of which an addition makes the next carry from the one before."""
        handing = self._only_reader(op.results[0])
        others = [value for value in op.operands if value != term]
        if handing is None or handing.primitive != _CARRIED or len(others) != 1:
            return 0
        (carry,) = others
        if self._before.get(handing.results[0]) != carry or self._only_reader(carry) is not op:
            return 0
        producer = self._graph.producers.get(carry)
        if producer is None or self._graph.ops[producer].primitive != _ENTERING:
            return 0
        return handing.repeats // self._graph.ops[producer].repeats
