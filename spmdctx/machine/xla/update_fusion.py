"""XLA on TPU computes an update inside the product of its gradient, even where that is slower.

What XLA does: if a gradient is not reduced between devices, XLA computes the optimizer's update inside the matrix product that makes the
    gradient. The product's tiles then share the chip's memory with those of the parameter and its moments. That costs nothing as long as
    the chip holds the whole of the product's smaller operand; otherwise XLA reads operands again and again.
Seen in: libtpu 0.0.42, by the compiler's cycles, AdamW in float32: 1.71 to 2.03 times what the two take apart on v5p, 1.82 on v5e and 1.85
    on v6e, if the smaller operand exceeds the chip's memory; 0.66 to 0.97 if it does not. On v5p momentum 1.43, SGD 1.09. GPU and CPU:
    not measured.
Switch: `Compiler.scratch_bytes`, the size of an operand that the chip can hold
Priced by: cost.price.directives chooses the gradients; cost.price.memory lets no update run early behind such a barrier. In
    cost.memory.copies these products may still run last, as if they were fused.
Written or prevented by: lowering.rewrite.rewriter puts a barrier behind the gradient.
Checked by: tests/machine/xla/test_update_fusion.py, benchmarks/speedup_table.py
"""

from __future__ import annotations

from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import local_bytes, partial_axes, project
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.rules.elementwise import ELEMENTWISE


def unfused_updates(graph: Graph, assignment: Assignment, mesh: LogicalMesh, scratch_bytes: int) -> dict[int, int]:
    """Returns the gradients behind which a barrier stands, by the matrix product that makes each.

    There are none if `scratch_bytes`, the size of an operand that the chip can hold, is 0.
    """
    if not scratch_bytes:
        return {}
    terminal = overlap_candidates(graph).terminal
    products = [op for op in ops_of(graph, ("dot_general",)) if terminal[op.results[0]]]
    found = {op.id: unfused_gradient(graph, assignment, mesh, scratch_bytes, op) for op in products}
    return {op: value for op, value in found.items() if value is not None}


def unfused_gradient(graph: Graph, assignment: Assignment, mesh: LogicalMesh, scratch_bytes: int, op: Op) -> int | None:
    """Returns the gradient that a matrix product `op` makes, if a barrier stands behind it, else None."""
    if op.primitive != "dot_general" or LITERAL in op.operands:
        return None
    axes = assignment.ops[op.id].axes
    if partial_axes(op.rule, axes):
        return None
    pairs = zip(op.operands, op.rule.operands, strict=True)
    if min(local_bytes(graph.values[value], project(dims, axes), mesh) for value, dims in pairs) <= scratch_bytes:
        return None
    value = _turned(graph, op.results[0])
    return value if _is_added(graph, value) else None


def _turned(graph: Graph, value: int) -> int:
    """Returns the value, or the last of its transposes, if a transpose is all that reads it."""
    while len(graph.readers[value]) == 1 and graph.readers[value][0].primitive == "transpose":
        (value,) = graph.readers[value][0].results
    return value


def _is_added(graph: Graph, value: int) -> bool:
    """Returns whether element-wise ops combine a value with another tensor of its shape."""
    shape, reached = graph.values[value].shape, [value]
    for known in reached:
        for op in graph.readers[known]:
            if op.primitive not in ELEMENTWISE or graph.values[op.results[0]].shape != shape:
                continue
            if any(other not in (LITERAL, known) and graph.values[other].shape == shape and other not in reached for other in op.operands):
                return True
            reached.append(op.results[0])
    return False
