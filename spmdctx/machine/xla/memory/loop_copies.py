"""XLA on GPU keeps more in memory around loops: slices for matrix products, stacks in another layout, spread constants.

What XLA does: a library or kernel computes a matrix product from memory to memory, so that an iteration's slice of a stack is written
    before the product that reads it. A product finds the dims of its batch outermost. If they are not so in a stack, XLA gives the whole
    stack another layout, and copies it before the first iteration. What enters a loop on one device is in memory, also one number that was
    spread over a tensor; for several devices it is made in the loop. What a loop stacks up is in memory before a sum of gradients takes it.
    On TPU, too, a device that has a whole stack, and whose iterations read a part of each slice, cuts these parts off before the loop.
Seen in: CUDA plugin 0.10.2 for H100: backward passes of scanned decoders hold transposed queries, keys and values of all layers, the slices
    that their products read, and stacks of gradients; planned peaks of stages were 0.76 to 0.89 of compiled ones without these.
Switch: none: a property of compilers that follows from other switches
Priced by: cost.memory.lives, cost.memory.loops, cost.price.moves
Written or prevented by: nothing
Checked by: tests/machine/xla/test_loop_copies.py, tests/lowering/test_stage_peaks.py, tests/cost/price/test_price.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import ANNOTATIONS, ENTERING, HEAVY


class LoopRead(NamedTuple):
    """What a loop reads of a value that enters it by the op `entering`.

    `products` are the matrix products that read it as it is. `is_sliced` says that they read the slice of an iteration, `is_copied`
    that the whole value is copied before the loop.
    """

    entering: int
    value: int
    slice: int
    products: tuple[int, ...]
    is_sliced: bool
    is_copied: bool


def loop_reads(graph: Graph, materialized: bytearray, carried: Collection[int], *, is_split: bool) -> Iterator[LoopRead]:
    """Gives what loops read from copies.

    Args:
        graph: the step.
        materialized: a flag for each value: 1 if it exists in memory.
        carried: what loops carry.
        is_split: whether the step runs on more than one device.
    """
    for op in ops_of(graph, ENTERING):
        value, inside = op.operands[0], op.results[0]
        if inside in carried or value == LITERAL:
            continue
        reads = list(_products(graph, inside))
        is_sliced = graph.values[value].shape != graph.values[inside].shape
        is_turned = any(_batch_is_inside(product, place) for product, place in reads)
        is_copied = is_turned if materialized[value] else not is_split
        if is_copied or (reads and is_sliced):
            yield LoopRead(op.id, value, inside, tuple(product.id for product, _ in reads), is_sliced, is_copied)


def _products(graph: Graph, value: int) -> Iterator[tuple[Op, int]]:
    """Gives the products that read a value, under a mark or not, with the place of the operand."""
    for op in graph.readers[value]:
        if op.primitive in HEAVY:
            yield from ((op, place) for place, operand in enumerate(op.operands) if operand == value)
        elif op.primitive in ANNOTATIONS:
            yield from _products(graph, op.results[0])


def _batch_is_inside(op: Op, place: int) -> bool:
    """Returns whether a dim of an operand that is no batch stands before one of the batch."""
    operands, results = op.rule.operands, op.rule.results
    if len(operands) != 2 or place > 1:
        return False
    both = {factor for dim in operands[0] for factor in dim} & {factor for dim in operands[1] for factor in dim}
    batch = both & {factor for dim in results[0] for factor in dim}
    sizes = op.rule.sizes
    kinds = [bool(batch & set(dim)) for dim in operands[place] if any(sizes[factor] > 1 for factor in dim)]
    return kinds != sorted(kinds, reverse=True)
