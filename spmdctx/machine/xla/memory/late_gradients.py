"""XLA on several GPUs makes the gradients of weights last: what only their products read stays in memory until then.

What XLA does: in a program for several devices its latency-hiding scheduler orders every computation from the end backwards, so that the
    whole chain of cotangents runs before products that make gradients; to hide reductions, too, it keeps such products for the end. In a
    step that recomputes its layers, every layer's recomputed activations then live at once, as if nothing were recomputed. It runs nothing
    behind an optimization barrier before what is ahead of it.
    So with barriers behind the layers, what a layer's products read lives to the layer's end, and what only makes their operands runs then.
    In a loop over layers they run at the end of each iteration. Without regions and loops the gradient of every layer is made when the
    chain has ended, so that all cotangents live until then; those of convolutions are made in turn. A program for one device is ordered
    so that what frees memory runs first: no product waits there.
    Updates that nothing waits for hide collectives: they run in the next region that has some, or else last, and their gradients wait.
    In a program without collectives that scheduler does nothing: it is ordered like one for one device, and gradients wait for barriers.
    An iteration writes the gradients that a loop stacks up last, in either order.
    None of these gradients is made at the end of the step, whatever takes it (`machine.xla.late_products`): barriers read those of most
    regions, and those of the last one are made in turn, too.
Seen in: CUDA plugin 0.10.2 for 8 x H100: decoders of 6 and 8 recomputed layers take 1.2 to 1.6 times as much memory as with barriers
    behind the layers; with barriers, stages were planned at 1.1 to 2.6 times what they take if gradients were to be made last, and at
    0.75 to 0.88 without gradients that wait for updates. Stages of 8 unrolled layers were planned at 0.77 to 0.80 of what they take with
    gradients made in turn, and recomputed ones without collectives at up to 1.17 if ordered as with them (benchmarks/RESULTS.md). TPU's
    scheduler has a limit of memory instead (`machine.xla.memory.scheduler_limit`).
Switch: none: `LATE_ON`, and a property of compilers that follows from other switches
Priced by: cost.memory.lives counts on several devices as if the gradients of a recomputed region were made at its end, and others when
    something reads them, and stacked ones as if iterations wrote them last; cost.price.memory, that gradients wait for updates.
Written or prevented by: lowering.rewrite.waiting.early_gradients
Checked by: tests/machine/xla/test_late_gradients.py, tests/lowering/test_early_gradients.py, tests/lowering/test_stage_peaks.py
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np

from spmdctx.ir.analysis.incidence import executions
from spmdctx.ir.analysis.kinds import of_primitives, ops_of
from spmdctx.ir.graph import LITERAL, Graph
from spmdctx.ir.primitives import CONTRACTIONS, HEAVY, SCAN_EXIT, VIEWS
from spmdctx.machine.xla.overlap import overlap_candidates

LATE_ON = frozenset({"gpu"})
"""The backends that do so."""


def waits_in_regions(graph: Graph, scopes: Sequence[int]) -> dict[int, int]:
    """Returns for the ops of recomputed regions, and of loops, that run at the end of their region or iteration its last op.

    These are products that only make gradients, and what other ops make for such products alone. Of the products, the half made last is
    left out outside of loops: it may run later.

    Args:
        graph: the step, which runs on more than one device.
        scopes: per op the computation that it belongs to (`Program.scopes`).
    """
    scope_of = np.array(scopes, dtype=np.int64)
    loops, products = set(scope_of[executions(graph) > 1].tolist()), _gradients_inside(graph, scopes)
    found: dict[int, int] = {}
    for scope, own in products.items():
        half = -(-len(own) // 2)
        found.update(dict.fromkeys(own[:half] if scope not in loops else own, int(np.flatnonzero(scope_of == scope)[-1])))
    for op in reversed(graph.ops) if found else ():
        if scopes[op.id] in products and op.primitive not in HEAVY:
            readers = [reader.id for value in op.results for reader in graph.readers[value]]
            if readers and all(reader in found and scopes[reader] == scopes[op.id] for reader in readers):
                found[op.id] = found[readers[0]]
    return found


def made_in_turn(graph: Graph, scopes: Sequence[int]) -> frozenset[int]:
    """Returns the products that only make gradients of recomputed regions, where there are several: none runs at the end of the step.

    Args:
        graph: the step, which runs on more than one device.
        scopes: per op the computation that it belongs to (`Program.scopes`).
    """
    products = _gradients_inside(graph, scopes)
    return frozenset(chain.from_iterable(products.values())) if len(products) > 1 else frozenset()


def updates_wait(graph: Graph, scopes: Sequence[int], moving: Collection[int]) -> dict[int, int]:
    """Returns until when gradients of recomputed regions wait for what reads them, where there are several regions.

    That is the beginning of the next region in which devices communicate, or else the end of the step.

    Args:
        graph: the step, in which devices communicate.
        scopes: per op the computation that it belongs to (`Program.scopes`).
        moving: the ops for which they do.
    """
    products, found = _gradients_inside(graph, scopes), dict[int, int]()
    if len(products) < 2:
        return found
    first = {scope: index for index, scope in reversed(list(enumerate(scopes)))}
    busy = sorted({first[scopes[index]] for index in moving if scopes[index] != _TOP})
    for own in products.values():
        place = bisect_right(busy, own[0])
        until = busy[place] if place < len(busy) else len(graph.ops) - 1
        found.update((value, until) for index in own if graph.ops[index].repeats == 1 for value in graph.ops[index].results)
    return found


def barriers_wait(graph: Graph, scopes: Sequence[int]) -> dict[int, int]:
    """Returns until when gradients of recomputed regions wait for the barrier behind their region, or, the later half, behind the next.

    No barrier stands behind the last region.

    Args:
        graph: the step, which runs on more than one device.
        scopes: per op the computation that it belongs to (`Program.scopes`).
    """
    products = {scope: own for scope, own in _gradients_inside(graph, scopes).items() if graph.ops[own[0]].repeats == 1}
    last = {scope: index for index, scope in enumerate(scopes)}
    ends, found = [last[scope] for scope in products][:-1], dict[int, int]()
    for place, (own, end) in enumerate(zip(products.values(), ends, strict=False)):
        half = -(-len(own) // 2)
        for index, until in zip(own, [end] * half + ends[place + 1 : place + 2] * (len(own) - half), strict=False):
            found.update(dict.fromkeys(graph.ops[index].results, until))
    return found


def _gradients_inside(graph: Graph, scopes: Sequence[int]) -> dict[int, list[int]]:
    """Returns the products that only make gradients, by the computation inside of which they stand, in the order of the graph."""
    terminal, found = overlap_candidates(graph).terminal, dict[int, list[int]]()
    for index in np.flatnonzero(of_primitives(graph, HEAVY)).tolist():
        if scopes[index] != _TOP and all(map(terminal.__getitem__, graph.ops[index].results)):
            found.setdefault(scopes[index], []).append(index)
    return found


def stacked_last(graph: Graph) -> dict[int, int]:
    """Returns for the gradients that loops stack up the op that ends their iteration; it writes them."""
    terminal = overlap_candidates(graph).terminal
    return {op.operands[0]: op.id for op in ops_of(graph, {SCAN_EXIT}) if op.operands[0] != LITERAL and terminal[op.operands[0]]}


def waits_outside(graph: Graph, scopes: Sequence[int]) -> dict[int, int]:
    """Returns when products that only make gradients run in a step without regions and loops: right before what reads the gradient.

    Args:
        graph: the step, which runs on more than one device.
        scopes: per op the computation that it belongs to (`Program.scopes`).
    """
    if any(scope != _TOP for scope in scopes):
        return {}
    terminal, found = overlap_candidates(graph).terminal, {}
    for op in ops_of(graph, CONTRACTIONS):
        if all(map(terminal.__getitem__, op.results)):
            reader = min((_first_reader(graph, value) for value in op.results), default=op.id)
            if op.id < reader < len(graph.ops):
                found[op.id] = reader
    return found


def _first_reader(graph: Graph, value: int) -> int:
    """Returns the first op that computes with a value; without one, the number of ops."""
    found = len(graph.ops)
    for op in graph.readers[value]:
        found = min([found, *(_first_reader(graph, result) for result in op.results)] if op.primitive in VIEWS else (found, op.id))
    return found


_TOP = 0
"""The scope of the step itself."""
