"""Products that make a gradient which the update of its state takes as it is: the compiler fuses them with it, and runs them last.

What such a product reads is in memory to the end of the step (XLA on TPU, seen in compiled programs of libtpu 0.0.42), unless the
step is made to wait for it (`memory_early`). A gradient that is
reduced, or moved, before the update is no such one: its product runs where others leave it (`memory_order`), as does what a loop makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmdctx.ir.analysis.kinds import op_kinds, ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.machine.xla.fusion import CHAINED
from spmdctx.machine.xla.overlap import MATRIX_PRODUCTS, sides

_LONGEST = 100
"""Values of an update that are looked at."""

LARGEST_UPDATE = 128 * 2**20
"""Bytes that an update makes at most, if its product is to be fused with it: TPU's fast memory holds them."""


class GradientProduct(NamedTuple):
    """A product that makes nothing but a gradient.

    `made` are the values that become of it, on the way to the step's results. `read` are those in memory that the product takes
    as they are, `read_inside` those that it takes on the way through chains which do not exist in memory.
    """

    op: int
    made: tuple[int, ...]
    read: tuple[int, ...]
    read_inside: tuple[int, ...]


def gradient_products(graph: Graph, held: bytearray, turns: Sequence[int]) -> tuple[GradientProduct, ...]:
    """The products that may run last. Depends on no sharding.

    Args:
        graph: the step.
        held: per value whether it exists in memory.
        turns: of `memory_order.turn_ends`.
    """
    terminal = sides(graph).terminal
    chained = op_kinds(graph).flags(lambda op: op.primitive in CHAINED and "." not in op.primitive).tolist()
    found = []
    for op in ops_of(graph, MATRIX_PRODUCTS - {"shard_map"}):
        if op.repeats > 1 or turns[op.id] != op.id:
            continue
        if len(op.results) == 1 and terminal[op.results[0]] and (made := _becomes(graph, op.results[0], chained)):
            read = [value for value in op.operands if held[value]]
            found.append(GradientProduct(op.id, made, tuple(read), _read_inside(graph, op, held)))
    return tuple(found)


def _becomes(graph: Graph, gradient: int, chained: Sequence[bool]) -> tuple[int, ...]:
    """The values that chains of element-wise ops make of a gradient; none where something else reads one."""
    seen, left = {gradient: None}, [gradient]
    while left:
        for reader in graph.readers[left.pop()]:
            if not chained[reader.id] or len(seen) > _LONGEST:
                return ()
            for value in reader.results:
                if value not in seen:
                    seen[value] = None
                    left.append(value)
    return tuple(seen)


def _read_inside(graph: Graph, op: Op, held: bytearray) -> tuple[int, ...]:
    left = [value for value in op.operands if value != LITERAL and not held[value]]
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
            if held[operand]:
                found[operand] = None
            else:
                left.append(operand)
    return tuple(found)
