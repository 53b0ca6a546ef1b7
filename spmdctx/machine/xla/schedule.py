"""XLA runs the ops of a step in another order than the one in which they were traced.

What XLA does: it updates state as soon as its gradient is there, which frees the gradient. It puts off products that only make gradients,
    so that they run while others wait for their operands to be moved; it puts none off past a loop, and none on TPU in a stage of a
    pipeline whose gradients wait for the last micro-batch, unless the chip hides gathers and the stage has some. How far depends on more
    than the program: the scheduler fills the waits for communication from the step's end backwards.
Seen in: libtpu 0.0.42, v5e:2x4: without products put off 50 of 70 peaks are within 15 % instead of 54; of the 40
    non-random plans, 36 are within 15 %, and 35 without early updates. 8 x H100, CUDA plugin 0.10.2: in the traced order 32 of 56, in this
    one 41. 29 stages on v5e and v5p that move more than 3 MiB and keep gradients: planned 0.99 to 1.42 times as large as compiled with
    products put off, and 0.86 to 1.04 without; on v6e eight more showed the same. Two stages on v5e whose layers gather 0.07 to 1.3 MiB run
    about ten products around a gather: 0.80 and 0.83 without, 1.04 and 1.05 with products put off (benchmarks/RESULTS.md).
Switch: none: all backends
Priced by: cost.memory.lives
Written or prevented by: nothing
Checked by: tests/machine/xla/test_schedule.py, tests/cost/memory/test_lives.py, benchmarks/fidelity_plans.py
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from spmdctx.ir.analysis.incidence import ends, executions
from spmdctx.ir.analysis.kinds import of_primitives, op_kinds, ops_of
from spmdctx.ir.arrays import BoolArray
from spmdctx.ir.graph import LITERAL, Graph
from spmdctx.ir.primitives import BOUNDARY_OF, ENTERING, HEAVY, LEAVING, LOOP_BOUNDARIES
from spmdctx.machine.xla.fusion import CHAINED
from spmdctx.machine.xla.overlap import overlap_candidates

_MOST_PASSED = 6
_LEAST_PASSED = 2
_PART_PASSED = 9
"""A product that only makes a gradient is put off behind a ninth of the step's other products: behind at most six, and behind at least
two if there are four.

Measured on: 70 plans for v5e:2x4; 5, 8 or 10 in place of 6 fit about as well.
Checked by: benchmarks/fidelity_plans.py
"""

_NONE: Mapping[int, int] = MappingProxyType({})


def order(graph: Graph, is_split: bool = True, waits: Mapping[int, int] = _NONE, branches: Mapping[int, int] = _NONE) -> tuple[int, ...]:
    """Returns for each op the place at which it runs, counted in traced ops; several ops may have one place.

    Args:
        graph: The step.
        is_split: True if values are moved between devices at all.
        waits: For products that only make gradients and run with a later op, this op.
        branches: The same for products that others need.
    """
    runs = list(range(len(graph.ops)))
    products = of_primitives(graph, HEAVY)
    if not products.any():
        return tuple(runs)
    terminal = _terminal_ops(graph)
    others = _Others(graph, terminal, products)
    chained = op_kinds(graph).flags(lambda op: op.primitive in CHAINED and any(value != LITERAL for value in op.operands)).tolist()
    moves = (products & is_split).tolist()
    # When each value is there: inputs and literals from the start.
    times = np.zeros(len(graph.values) + 1, dtype=np.int64)
    makers, made = ends(graph).results
    times[made] = makers
    made_at = times.tolist()
    movable = terminal & (executions(graph) <= 1)
    movable[list(waits)] = True
    left = movable | (np.arange(len(graph.ops)) >= min(branches)) if branches else movable
    free = movable.tolist()
    for index in np.flatnonzero(left & ~_boundaries(graph)).tolist():
        op = graph.ops[index]
        at = 0
        for value in op.operands:
            if made_at[value] > at:
                at = made_at[value]
        if index in waits or index in branches:
            runs[index] = max(at, waits.get(index, branches.get(index, 0)))
        elif free[index] and chained[index] and others.next_after[at] < index:
            runs[index] = at
        elif free[index] and moves[index]:
            runs[index] = max(at, others.end_of_wait(index))
        elif at > index:
            runs[index] = at
        if runs[index] != index:
            for value in op.results:
                made_at[value] = runs[index]
    return tuple(runs)


def iteration_ends(graph: Graph, scopes: Sequence[int]) -> tuple[int, ...]:
    """Returns for each op the last op of its iteration of the innermost loop around it; outside of loops, the op itself.

    Args:
        graph: The step.
        scopes: The computation to which each op belongs (`Program.scopes`).
    """
    found = list(range(len(graph.ops)))
    if not _boundaries(graph).any():
        return tuple(found)
    open_iterations: list[int] = []
    before: tuple[str, int] | None = None
    for op in reversed(graph.ops):
        kind = "enter" if op.primitive in ENTERING else "leave" if op.primitive in LEAVING else ""
        now = (kind, scopes[op.id])
        if kind == "leave":
            if now == before:
                open_iterations.pop()
            open_iterations.append(op.id - 1)
        elif kind == "enter":
            if now != before and open_iterations:
                open_iterations.pop()
        elif open_iterations:
            found[op.id] = open_iterations[-1]
        before = now
    return tuple(found)


def first_runs(graph: Graph, materialized: bytearray, runs: Sequence[int]) -> tuple[int, ...]:
    """Returns for each op when it first runs; a fused op runs with the first of the ops into which it is fused.

    Args:
        graph: The step.
        materialized: A flag for each value: 1 if it exists in memory.
        runs: The result of `order`.
    """
    first, never = list(runs), len(graph.ops)
    read = [never] * (len(graph.values) + 1)
    for index, primitive, operands, results, _, _, _, _, _, _ in reversed(graph.ops):
        time = first[index]
        if results and primitive not in BOUNDARY_OF:
            own, time = time, never
            for value in results:
                when = own if materialized[value] else read[value]
                if when < time:
                    time = when
            if time == never:
                time = own
            elif time != own:
                first[index] = time
        for value in operands:
            if read[value] > time:
                read[value] = time
    return tuple(first)


def needed_products(graph: Graph) -> tuple[int, ...]:
    """Returns the matrix products that other products need."""
    terminal = overlap_candidates(graph).terminal
    return tuple([op.id for op in ops_of(graph, HEAVY) if not all(map(terminal.__getitem__, op.results))])


class _Others:
    """The ops of a step that matrix products need; the memory that they find is what counts.

    `next_after` has for each op the first of them that is traced after it, or the number of all ops if there is none.
    """

    def __init__(self, graph: Graph, terminal: BoolArray, products: BoolArray) -> None:
        places, count = np.flatnonzero(~terminal), len(graph.ops)
        self._last = int(places[-1]) if len(places) else count - 1
        self._products: list[int] = np.flatnonzero(products & ~terminal).tolist()
        self._loops = [op.id for op in ops_of(graph, ENTERING)]
        fewest = min(_LEAST_PASSED, len(self._products) // 2)
        self._passed = min(_MOST_PASSED, max(fewest, len(self._products) // _PART_PASSED))
        self.next_after: list[int] = np.append(places, count)[np.searchsorted(places, np.arange(count), side="right")].tolist()

    def end_of_wait(self, place: int) -> int:
        """Returns where a product runs that is traced at a place and is none of these ops."""
        if not self._passed:
            return place
        behind = bisect_right(self._products, place) + self._passed - 1
        found = self._products[behind] if behind < len(self._products) else self._last
        loop = bisect_right(self._loops, place)
        return max(place, min(found, self._loops[loop] - 1) if loop < len(self._loops) else found)


def _terminal_ops(graph: Graph) -> BoolArray:
    """Returns for each op whether it has results, and no matrix product needs any of them."""
    makers, made = ends(graph).results
    needed = np.frombuffer(overlap_candidates(graph).terminal, dtype=np.uint8)[made] == 0
    found, leads = np.zeros(len(graph.ops), dtype=bool), np.zeros(len(graph.ops), dtype=bool)
    found[makers] = True
    leads[makers[needed]] = True
    return found & ~leads


def _boundaries(graph: Graph) -> BoolArray:
    """Returns for each op whether it is a boundary at which a loop begins, hands on its carry, or ends."""
    return of_primitives(graph, LOOP_BOUNDARIES)
