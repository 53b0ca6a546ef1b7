"""Chooses the updates of state that run right behind the product that makes their gradient, and not at the end of the step.

XLA would run such a product last (`machine.xla.late_products`). What it reads would stay in memory until then: the logits' gradient
through the whole backward pass. If that makes the peak of a step, the rest of the step waits for the update
(`lowering.rewrite.waiting.waits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from spmdctx.cost.memory.lives import StepMemory
from spmdctx.ir.analysis.chains import Walk
from spmdctx.ir.arrays import IntArray
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import HEAVY
from spmdctx.machine.xla.late_products import GradientProduct
from spmdctx.machine.xla.overlap import overlap_candidates

_LEAST_SAVED = 1 / 6
"""The part of the peak that early updates must save; what waits can hide no communication, which costs 0.8 % of the time in the mean.

Measured on: 120 plans for v5e:2x4, of which 17 wait; at a tenth 29 would, at a quarter 8.
Checked by: benchmarks/fidelity_plans.py
"""

_LEAST_SHARE = 0.02
"""The part of the peak that one product must keep alive for its update to run early.

Measured on: not measured.
Checked by: tests/cost/memory/test_early_updates.py
"""

_MOST_ROUNDS = 8


class EarlyUpdate(NamedTuple):
    """An update of state that runs early: all ops that read the value `gate` wait for it.

    The op `op` makes its gradient, and `results` are the new state.
    """

    op: int
    gate: int
    results: tuple[int, ...]


class Late(NamedTuple):
    """The products that run last in a plan, and the memory that they keep alive.

    `alive` has the bytes at each op with these products, and `alive_with` returns them for others. `waiting` returns the bytes that each
    product keeps alive at a time. `fuses` says of an op whether XLA computes the update in the product: where they are apart
    (`update_fusion.unfused_updates`) little was saved.
    """

    products: Mapping[int, GradientProduct]
    alive: IntArray
    alive_with: Callable[[Mapping[int, GradientProduct]], IntArray]
    waiting: Callable[[Mapping[int, GradientProduct], int], dict[int, int]]
    fuses: Callable[[Op], bool]


def early_updates(graph: Graph, scopes: Sequence[int], memory: StepMemory, late: Late) -> tuple[tuple[EarlyUpdate, ...], IntArray]:
    """Returns the updates that run early, and the bytes alive at each op then; no updates if they would save little of the peak.

    Args:
        graph: the step.
        scopes: per op the computation that it belongs to (`Program.scopes`).
        memory: what is known of the step's memory before its shardings are known.
        late: the products that run last if no update runs early.
    """
    found: dict[int, EarlyUpdate] = {}
    left, alive = dict(late.products), late.alive
    for _ in range(_MOST_ROUNDS):
        peak = int(alive.max())
        waiting = late.waiting(left, int(alive.argmax()))
        large = [left[op] for op, size in waiting.items() if size >= _LEAST_SHARE * peak and late.fuses(graph.ops[op])]
        ready = [update for one in large if (update := _early(graph, scopes, memory, one)) is not None]
        if not ready:
            break
        found.update((update.op, update) for update in ready)
        left = {op: one for op, one in left.items() if op not in found}
        alive = late.alive_with(left)
    if alive.max() > (1 - _LEAST_SAVED) * late.alive.max():
        return (), late.alive
    return tuple(found.values()), alive


def _early(graph: Graph, scopes: Sequence[int], memory: StepMemory, product: GradientProduct) -> EarlyUpdate | None:
    """Returns the update with a product's gradient and the value that waits for it; None if nothing can wait."""
    outputs = set(graph.outputs)
    results = tuple(value for value in product.made if value in outputs)
    gate = _gate(graph, scopes, memory, product)
    if not results or scopes[product.op] or gate is None or _depends(graph, product, gate):
        return None
    return EarlyUpdate(product.op, gate, results)


def _gate(graph: Graph, scopes: Sequence[int], memory: StepMemory, product: GradientProduct) -> int | None:
    """Returns the result of the first later product that reads what this one does and that other ops wait for; None without one."""
    terminal, readers = overlap_candidates(graph).terminal, graph.readers
    ready = max((graph.producers.get(value, -1) for value in graph.ops[product.op].operands if value != LITERAL), default=-1)
    walk, found = Walk([*product.read, *product.read_inside]), list[Op]()
    for value in walk:
        for op in readers[value]:
            if op.primitive not in HEAVY:
                walk.reach(result for result in op.results if not memory.materialized[result])
            elif op.id > ready and not terminal[op.results[0]] and not scopes[op.id] and memory.iteration_ends[op.id] == op.id:
                found.append(op)
    return min(found, key=lambda op: op.id).results[0] if found else None


def _depends(graph: Graph, product: GradientProduct, gate: int) -> bool:
    """Returns whether the update reads, beside the gradient, anything computed from the gate; also if that is too far to see."""
    made = set(product.made)
    beside = {value for result in made - {*graph.ops[product.op].results} for value in _operands(graph, result)} - made
    walk = Walk(beside)
    for value in walk:
        if value == gate:
            return True
        walk.reach(_operands(graph, value))
    return walk.is_cut


def _operands(graph: Graph, value: int) -> Iterable[int]:
    maker = graph.producers.get(value)
    return () if maker is None else [operand for operand in graph.ops[maker].operands if operand != LITERAL]
