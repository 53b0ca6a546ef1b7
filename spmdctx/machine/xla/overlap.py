"""XLA hides gathers of weights behind matrix products on some chips.

What XLA does: a weight value comes from parameters alone through no matrix product, so it can be gathered before its product's turn
    comes. A terminal value reaches no matrix product, so its reduction could run while the products of earlier layers' gradients do;
    XLA hides gathers on one chip, and no reductions. The user chooses the type in which low-precision gradients are reduced.
Seen in: libtpu 0.0.42, scheduled programs: on v5e:2x4 39 % of the time of weight gathers under ZeRO-3 hides in the sum of eight models
    (7 to 64 %), in searched plans 14 to 59 %; no reduction is asynchronous. On v5p:2x2x2 and v6e:2x4 nothing is. GPU and CPU: not
    measured.
Switch: `Compiler.gather_overlap`, `Compiler.reduction_overlap`: the largest share of the time that hides.
Priced by: cost.price.moves, cost.price.reductions, cost.evaluate, search.problem.states, search.problem.network
Written or prevented by: nothing
Checked by: tests/machine/xla/test_overlap.py, tests/machine/test_topology.py, benchmarks/speedup_table.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmdctx.ir.analysis.kinds import of_primitives, ops_of
from spmdctx.ir.graph import LITERAL, LOW, Graph, Op, Role
from spmdctx.ir.primitives import ADDITIONS, CARRYING, HEAVY, WIDENED
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.collectives.combining import reduction_machine

_NO_WEIGHTS = frozenset({Role.BATCH, Role.KEY, Role.ARGUMENT, Role.INTERMEDIATE})

_CONSTANT = 2


class OverlapCandidates(NamedTuple):
    """Flags for each value of a graph: 1 in `weights` for a weight value, and 1 in `terminal` for a terminal one."""

    weights: bytearray
    terminal: bytearray

    def reduction_machine(self, value: int, topology: Topology) -> Topology:
        """Returns the machine by which a reduction of the value's partial results is priced."""
        return reduction_machine(bool(self.terminal[value]), topology)

    def widening(self, op: Op, value: int, dtype: str, topology: Topology) -> int:
        """Returns the factor by which a partial result of the op is larger when it is reduced."""
        return widening(op, dtype, bool(self.terminal[value]), topology)

    def gather_share(self, value: int, topology: Topology) -> float:
        """Returns the largest share of a reshard of the value that can hide."""
        return topology.compiler.gather_overlap if self.weights[value] else 0.0

    def reduction_share(self, value: int, topology: Topology) -> float:
        """Returns the largest share of a reduction of the value's partial results that can hide."""
        return topology.compiler.reduction_overlap if self.terminal[value] else 0.0


def widening(op: Op, dtype: str, is_terminal: bool, topology: Topology) -> int:
    """Returns 2 if a low-precision gradient is reduced in float32, else 1; a sum of unreduced terms is widened as they are."""
    wide = topology.preferences.widens_gradients and is_terminal and dtype in LOW and op.rule.combiner == "add"
    return 2 if wide and (op.primitive in WIDENED or op.primitive in ADDITIONS) else 1


def overlap_candidates(graph: Graph) -> OverlapCandidates:
    """Classifies all values of a graph; this depends on no sharding."""
    known: OverlapCandidates | None = graph.facts.get(overlap_candidates)
    if known is None:
        loops = _loops(graph)
        known = graph.facts[overlap_candidates] = OverlapCandidates(_weights(graph, loops), _terminal(graph, loops))
    return known


def terminal_values(graph: Graph, stops: frozenset[int], ops: frozenset[int] | None = None) -> bytearray:
    """Returns a flag for each value: 1 if none of some ops can be reached from it, on ways that end at `stops`.

    The ops are the matrix products if none are given.
    """
    flags = None if ops is None else [index in ops for index in range(len(graph.ops))]
    return _terminal(graph, _loops(graph), stops, flags)


def _loops(graph: Graph) -> list[tuple[int, int]]:
    carries = {op.results[0] for op in ops_of(graph, CARRYING)}
    # The step's inputs may be tied to what a loop hands on, as its next state; within a step only the loop goes round.
    given = set(graph.inputs)
    return [pair for pair in graph.ties if pair[1] in carries and pair[0] not in given]


def _weights(graph: Graph, loops: list[tuple[int, int]]) -> bytearray:
    """Flags the values that depend on some parameter, on nothing of the batch, and on no matrix product."""
    # For each value: 0 if it depends on the batch or a product, 1 if on parameters, 2 if on nothing.
    found = bytearray([_CONSTANT]) * (len(graph.values) + 1)
    for value in graph.inputs:
        found[value] = 0 if graph.values[value].role in _NO_WEIGHTS else 1
    products = of_primitives(graph, HEAVY).tolist()
    carried: dict[int, int] = {}
    while True:
        for index, _, operands, results, _, _, _, _, _, _ in graph.ops:
            kind = 0 if products[index] else carried.get(results[0], _CONSTANT) if carried and results else _CONSTANT
            for value in operands:
                if found[value] < kind:
                    kind = found[value]
            for value in results:
                found[value] = kind
        # The next iteration of a loop starts from what this one hands on.
        more = {before: found[after] for before, after in loops if found[after] < found[before]}
        if not more:
            return bytearray(kind == 1 for kind in found)
        carried |= more


def _terminal(
    graph: Graph, loops: list[tuple[int, int]], stops: frozenset[int] = frozenset(), ops: Sequence[bool] | None = None
) -> bytearray:
    """Flags the values from which none of the flagged ops can be reached; those are the matrix products if `ops` is None."""
    products = of_primitives(graph, HEAVY).tolist() if ops is None else ops
    leads = bytearray(len(graph.values) + 1)
    while True:
        for index, _, operands, results, _, _, _, _, _, _ in reversed(graph.ops):
            onward = products[index]
            for value in results:
                if leads[value] and value not in stops:
                    onward = True
            if onward:
                for value in operands:
                    leads[value] = 1
        leads[LITERAL] = 0
        # The next iteration of a loop reads what this one hands on.
        more = [after for before, after in loops if leads[before] and not leads[after]]
        if not more:
            return bytearray(not flag for flag in leads)
        for value in more:
            leads[value] = 1
