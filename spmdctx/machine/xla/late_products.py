"""XLA fuses a product with the update of the state that its gradient is for, and runs both last.

What XLA does: it fuses a product that makes a gradient with the update that takes this gradient unchanged, if the update makes 128 MiB or
    less. In some programs the fusion runs early, in others at the end of the step; its operands are in memory until then. A gradient that
    is reduced or moved before the update is not fused so, and neither is one that a loop makes: their products run where
    `machine.xla.schedule` says.
Seen in: libtpu 0.0.42, v5e:2x4 (70 and 50 plans) and v5p:2x2x2: LLaMA2-7B, 13B and 70B split by 8 were planned 17 to 65 % too large with
    larger updates counted too, and are 2 to 18 % now. 8 x H100, CUDA plugin 0.10.2: 41 of 56 peaks within 15 %, without this rule 38.
Switch: none: all backends; only `Compiler.runs_barriers_in_order` makes a step wait.
Priced by: cost.memory.lives, cost.memory.copies, cost.price.memory
Written or prevented by: cost.memory.early_updates chooses the updates that lowering.rewrite.waiting.waits makes the step wait for.
Checked by: tests/machine/xla/test_late_products.py, tests/cost/memory/test_early_updates.py, tests/lowering/rewrite/test_waits.py,
    benchmarks/fidelity_plans.py
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from spmdctx.ir.analysis.chains import Walk, ends_below
from spmdctx.ir.analysis.kinds import op_kinds, ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import MATRIX_PRODUCTS
from spmdctx.machine.xla.fusion import CHAINED
from spmdctx.machine.xla.overlap import overlap_candidates

LARGEST_UPDATE = 128 * 2**20
"""The most bytes that an update makes if XLA fuses its product with it: TPU's fast memory holds them.

Measured on: updates of 0.2 to 1 GB (LLaMA2 split by 8 on v5p:2x2x2); of smaller ones the same in 120 plans for v5e:2x4.
Checked by: benchmarks/fidelity_plans.py
"""


class GradientProduct(NamedTuple):
    """A product that makes nothing but a gradient.

    `made` are the gradient and the values computed from it, on the way to the step's results. `read` are the values in memory that
    the product takes unchanged. `read_inside` are those from which its other operands are computed, by chains that never exist in memory.
    """

    op: int
    made: tuple[int, ...]
    read: tuple[int, ...]
    read_inside: tuple[int, ...]


def gradient_products(
    graph: Graph, materialized: bytearray, iteration_ends: Sequence[int], in_turn: Container[int] = ()
) -> tuple[GradientProduct, ...]:
    """Returns the products that may run last; they depend on no sharding.

    Args:
        graph: The step.
        materialized: A flag for each value: 1 if it exists in memory.
        iteration_ends: The result of `schedule.iteration_ends`.
        in_turn: Products that do not (`memory.late_gradients`).
    """
    terminal = overlap_candidates(graph).terminal
    chained = op_kinds(graph).flags(lambda op: op.primitive in CHAINED and op.boundary is None).tolist()
    found = []
    for op in ops_of(graph, MATRIX_PRODUCTS):
        if op.repeats > 1 or iteration_ends[op.id] != op.id or op.id in in_turn:
            continue
        if len(op.results) == 1 and terminal[op.results[0]] and (made := _becomes(graph, op.results[0], chained)):
            read = [value for value in op.operands if materialized[value]]
            found.append(GradientProduct(op.id, made, tuple(read), _read_inside(graph, op, materialized)))
    return tuple(found)


def _becomes(graph: Graph, gradient: int, chained: Sequence[bool]) -> tuple[int, ...]:
    """Returns the values that chains of element-wise ops make of a gradient; none if another op reads one of them."""
    walk = Walk([gradient])
    is_read = next(ends_below(graph, walk, chained), None) is not None
    return () if is_read or walk.is_cut else tuple(walk.met)


def _read_inside(graph: Graph, op: Op, materialized: bytearray) -> tuple[int, ...]:
    left = [value for value in op.operands if value != LITERAL and not materialized[value]]
    seen: dict[int, None] = {}
    found: dict[int, None] = {}
    while left:
        value = left.pop()
        maker = graph.producers.get(value)
        if value in seen or maker is None:
            continue
        seen[value] = None
        for operand in graph.ops[maker].operands:
            if operand == LITERAL:
                continue
            if materialized[operand]:
                found[operand] = None
            else:
                left.append(operand)
    return tuple(found)
