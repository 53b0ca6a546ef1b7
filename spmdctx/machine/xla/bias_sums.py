"""XLA keeps some sums of a product and a bias in memory twice.

What XLA does: if a product is reduced between devices and a bias is added to it, XLA computes the addition again inside some readers,
    which then read the product. The sum over the batch in the bias's gradient is such a reader, if it adds up values of another reduced
    product. A matrix product that makes a gradient and takes a slice of a value computed from the sum is not: for it XLA writes the sum.
    Then the product and the sum are both in memory to the end of the backward pass.
Seen in: libtpu 0.0.42, v5e:2x4: one of 120 plans, a perceptron of 7.1 GB where 5.2 GB do (7066 and 5209 MiB), in the same time. GPU and
    CPU: not measured.
Switch: `Compiler.scratch_bytes`, which is 0 on machines where no barrier keeps a gradient apart from its update.
Priced by: nothing; the price counts the sum alone.
Written or prevented by: cost.price.directives chooses the sums; lowering.rewrite.rewriter puts a barrier behind each, which takes the
    product's place.
Checked by: tests/machine/xla/test_bias_sums.py, benchmarks/fidelity_plans.py
"""

from __future__ import annotations

from collections.abc import Sequence

from spmdctx.ir.analysis.chains import Walk, ends_below
from spmdctx.ir.analysis.kinds import of_primitives, ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import ADDITIONS
from spmdctx.ir.projection import partial_axes, project
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.machine.xla.partitioner.recompute import refines
from spmdctx.rules.elementwise import ELEMENTWISE


def written_once(graph: Graph, assignment: Assignment) -> frozenset[int]:
    """Returns the sums behind which a barrier stands."""
    biased = {op.results[0] for op in ops_of(graph, ADDITIONS) if _is_biased(graph, assignment, op)}
    if not biased:
        return frozenset()
    summed = _made_of_sums(graph, assignment, biased)
    elementwise = of_primitives(graph, ELEMENTWISE).tolist()
    return frozenset(value for value in biased if _is_kept_twice(graph, assignment, Walk([value]), elementwise, summed))


def _is_biased(graph: Graph, assignment: Assignment, op: Op) -> bool:
    """Returns whether an op adds a smaller value, repeated, to a product that is reduced and that nothing else reads."""
    makers = [graph.ops[graph.producers[value]] if value in graph.producers else None for value in op.operands]
    for product, bias in (makers, makers[::-1]):
        if product is None or bias is None or bias.primitive != "broadcast_in_dim" or bias.operands[0] == LITERAL:
            continue
        if _is_sum(assignment, product) and len(graph.readers[product.results[0]]) == 1 and graph.values[bias.operands[0]].shape:
            return True
    return False


def _is_sum(assignment: Assignment, op: Op) -> bool:
    return op.primitive == "dot_general" and bool(partial_axes(op.rule, assignment.ops[op.id].axes))


def _made_of_sums(graph: Graph, assignment: Assignment, biased: set[int]) -> set[int]:
    """Returns the reduced products and the values that element-wise ops make of them, but not the sums with a bias."""
    found: set[int] = set()
    for op in graph.ops:
        if _is_sum(assignment, op) or (op.primitive in ELEMENTWISE and not found.isdisjoint(op.operands)):
            found.update(value for value in op.results if value not in biased)
    return found


def _is_kept_twice(graph: Graph, assignment: Assignment, walk: Walk, elementwise: Sequence[bool], summed: set[int]) -> bool:
    terminal, is_sliced, is_added_up = overlap_candidates(graph).terminal, False, False
    for value, op in ends_below(graph, walk, elementwise):
        if op.primitive == "reduce_sum":
            is_added_up |= value in summed
        elif op.primitive == "dot_general" and terminal[op.results[0]]:
            is_sliced |= _takes_slice(assignment, op, value)
    return is_sliced and is_added_up


def _takes_slice(assignment: Assignment, op: Op, value: int) -> bool:
    stored, axes = assignment.values[value], assignment.ops[op.id].axes
    taken = [project(dims, axes) for operand, dims in zip(op.operands, op.rule.operands, strict=True) if operand == value]
    return any(sharding != stored and refines(stored, sharding) for sharding in taken)
