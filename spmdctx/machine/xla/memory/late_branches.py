"""XLA on GPU runs the shorter one of two branches as late as its result allows: what its product reads stays in memory until then.

What XLA does: in a program for several devices its latency-hiding scheduler orders every computation from the end backwards, also those
    without collectives if another one has some, and does not look at memory. Of the products that read one value, those whose results meet
    again later, the one on the shorter branch runs right before its result is read. In the backward pass of attention this is the product
    that makes the values' cotangent: it runs after the scores' cotangent is made, and keeps the softmax until then. A program for one
    device, or without collectives, is ordered so that what frees memory runs first.
Seen in: CUDA plugin 0.10.2 for H100: stages of recomputed decoders, 192 features and 1,024 tokens, need four values of the size of the
    scores on two devices, and three on one (benchmarks/RESULTS.md).
Switch: none: a property of compilers that follows from other switches
Priced by: machine.xla.schedule, for cost.memory.lives
Written or prevented by: nothing
Checked by: tests/machine/xla/test_late_branches.py, tests/lowering/test_stage_peaks.py
"""

from __future__ import annotations

from spmdctx.ir.analysis.kinds import op_kinds, ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import HEAVY
from spmdctx.machine.xla.fusion import CHAINED
from spmdctx.machine.xla.overlap import overlap_candidates


def late_branches(graph: Graph) -> dict[int, int]:
    """Returns when products run that stand beside another product which reads a value of theirs, too, if that is later than traced.

    Args:
        graph: the step, which runs on more than one device.
    """
    terminal = overlap_candidates(graph).terminal
    readers: dict[int, list[Op]] = {}
    for op in ops_of(graph, HEAVY):
        if not all(map(terminal.__getitem__, op.results)):
            for value in {value for value in op.operands if value != LITERAL}:
                readers.setdefault(value, []).append(op)
    forks = [ops for ops in readers.values() if len(ops) > 1]
    if not forks:
        return {}
    read = _first_reads(graph)
    found: dict[int, int] = {}
    for ops in forks:
        when = [min(read[value] for value in op.results) for op in ops]
        for place, (op, time) in enumerate(zip(ops, when, strict=True)):
            # Branches are side by side if nothing has read the result of the product before when the one behind runs.
            before, behind = place and when[place - 1] > op.id, place + 1 < len(ops) and ops[place + 1].id < time
            if op.id < time < len(graph.ops) and (before or behind):
                found[op.id] = time
    return found


def _first_reads(graph: Graph) -> list[int]:
    """Returns for each value when the first op that is no chain reads it, or what chains make of it."""
    chained = op_kinds(graph).flags(lambda op: op.primitive in CHAINED and op.boundary is None).tolist()
    first = [len(graph.ops)] * (len(graph.values) + 1)
    for op in reversed(graph.ops):
        time = min((first[value] for value in op.results), default=op.id) if chained[op.id] else op.id
        for value in op.operands:
            first[value] = min(first[value], time)
    return first
