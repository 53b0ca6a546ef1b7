"""When the ops of a step run, which is not quite the order in which they were traced.

The compiler updates state as soon as its gradient is there, which frees the gradient, and puts products that only make gradients off,
so that they run while others wait for their operands to be moved. Both were found in compiled programs (libtpu 0.0.42); how far
products are put off was chosen on them, and depends on more there than the program. None is put off past a loop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from spmdctx.ir import LITERAL, Graph
from spmdctx.rules.fusion import CHAINED
from spmdctx.search.overlap import MATRIX_PRODUCTS, sides

_MOST_PASSED = 6
_PART_PASSED = 9
"""A product that only makes a gradient is put off behind so many of the step's other products at most, and a ninth of them."""

_ENTERING = ("scan.enter", "while.enter")


def order(graph: Graph, waits: bool = True) -> tuple[int, ...]:
    """Per op the place at which it runs, counted in traced ops; several may have one place.

    Args:
        graph: the step.
        waits: whether values are moved between devices at all.
    """
    runs = list(range(len(graph.ops)))
    if not any(op.primitive in MATRIX_PRODUCTS for op in graph.ops):
        return tuple(runs)
    terminal = _terminal_ops(graph)
    others, makers = _Others(graph, terminal), graph.producers
    for op in graph.ops:
        if not terminal[op.id] or op.repeats > 1 or op.primitive.startswith(("scan.", "while.")):
            continue
        made = max([runs[makers[value]] for value in op.operands if value in makers], default=0)
        if op.primitive in CHAINED and others.are_between(made, op.id) and any(value != LITERAL for value in op.operands):
            runs[op.id] = made
        elif op.primitive in MATRIX_PRODUCTS and waits:
            runs[op.id] = max(made, others.end_of_wait(op.id))
        else:
            runs[op.id] = max(made, op.id)
    return tuple(runs)


def turn_ends(graph: Graph, scopes: Sequence[int]) -> tuple[int, ...]:
    """Per op the last op of the turn of the innermost loop that it is in; itself outside of loops.

    Args:
        graph: the step.
        scopes: per op the computation that it belongs to (`Program.scopes`).
    """
    ends = list(range(len(graph.ops)))
    open_turns: list[int] = []
    before: tuple[str, int] | None = None
    for op in reversed(graph.ops):
        kind = "enter" if op.primitive in _ENTERING else "leave" if op.primitive.startswith(("scan.", "while.")) else ""
        now = (kind, scopes[op.id])
        if kind == "leave":
            if now == before:
                open_turns.pop()
            open_turns.append(op.id - 1)
        elif kind == "enter":
            if now != before and open_turns:
                open_turns.pop()
        elif open_turns:
            ends[op.id] = open_turns[-1]
        before = now
    return tuple(ends)


def first_runs(graph: Graph, held: bytearray, runs: Sequence[int]) -> tuple[int, ...]:
    """Per op when it first runs: a fused one when the first op does that it is fused into.

    Args:
        graph: the step.
        held: per value whether it exists in memory.
        runs: of `order`.
    """
    first, never = list(runs), len(graph.ops)
    read = [never] * (len(graph.values) + 1)
    for op in reversed(graph.ops):
        if op.results and "." not in op.primitive:
            time = never
            for value in op.results:
                time = min(time, runs[op.id] if held[value] else read[value])
            if time != never:
                first[op.id] = time
        time = first[op.id]
        for value in op.operands:
            if read[value] > time:
                read[value] = time
    return tuple(first)


def needed_products(graph: Graph) -> tuple[int, ...]:
    """The matrix products that other products need."""
    terminal = sides(graph).terminal
    return tuple([op.id for op in graph.ops if op.primitive in MATRIX_PRODUCTS and not all(terminal[value] for value in op.results)])


class _Others:
    """The ops of a step that matrix products need: what they find in memory is what counts."""

    def __init__(self, graph: Graph, terminal: Sequence[bool]) -> None:
        self._places = [op.id for op in graph.ops if not terminal[op.id]]
        self._products = [place for place in self._places if graph.ops[place].primitive in MATRIX_PRODUCTS]
        self._loops = [op.id for op in graph.ops if op.primitive in _ENTERING]
        self._passed = min(_MOST_PASSED, len(self._products) // _PART_PASSED)

    def are_between(self, start: int, end: int) -> bool:
        """Whether some are traced between two places."""
        return bisect_right(self._places, start) < bisect_left(self._places, end)

    def end_of_wait(self, place: int) -> int:
        """Where a product at a place runs that is none of them."""
        if not self._passed:
            return place
        behind = bisect_right(self._products, place) + self._passed - 1
        found = self._products[behind] if behind < len(self._products) else self._places[-1]
        loop = bisect_right(self._loops, place)
        return max(place, min(found, self._loops[loop] - 1) if loop < len(self._loops) else found)


def _terminal_ops(graph: Graph) -> list[bool]:
    """Per op, whether it has results, none of which a matrix product needs."""
    terminal = sides(graph).terminal
    found = [len(op.results) > 0 for op in graph.ops]
    for op in graph.ops:
        for value in op.results:
            if not terminal[value]:
                found[op.id] = False
    return found
