"""The partitioner gathers an operand that was repeated for readers which split it differently.

What XLA does: it repeats an operand once for all equations that want the same shape, and splits the result as one of them does. Then it
    gathers the result for the others, although the plan moves no such tensor between devices.
Seen in: libtpu 0.0.42, v5p, LLaMA2-70B on 8 devices: one float32 all_gather of 512 MiB that was not planned (2.6 ms).
Switch: none: all backends
Priced by: nothing
Written or prevented by: lowering.rewrite.rewriter, lowering.rewrite.block: such operands are repeated by equations of their own, whole
    along the dimensions that are repeated, and each reader slices what it takes.
Checked by: tests/machine/xla/partitioner/test_repetition.py
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.projection import project
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.machine.xla.partitioner.recompute import is_recomputed
from spmdctx.rules.elementwise import ELEMENTWISE


def repeated_values(graph: Graph, assignment: Assignment, moved: Container[int]) -> frozenset[int]:
    """Returns the values that element-wise ops repeat in several shardings.

    `moved` holds the values that some reader takes in another sharding than that in which they are stored.
    """
    sliced = _sliced(graph.ops, moved)
    found: set[int] = set()
    seen: dict[tuple[int, tuple[int, ...]], list[tuple[str, ...]]] = {}
    for op in graph.ops:
        if op.primitive not in ELEMENTWISE or len(op.results) != 1:
            continue
        shape, made = graph.values[op.results[0]].shape, project(op.rule.results[0], assignment.ops[op.id].axes)
        for value in op.operands:
            if value == LITERAL or not is_repeated(graph.values[value].shape, shape):
                continue
            own = [axes for axes, size, full in zip(made, graph.values[value].shape, shape, strict=True) if size != full]
            if op.id in sliced or seen.setdefault((value, shape), own) != own:
                found.add(value)
    return frozenset(found)


def is_repeated(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Returns whether an element-wise equation repeats an operand of `shape` to `full`; scalars do not count."""
    return len(shape) == len(full) and tuple(shape) != tuple(full)


def _sliced(ops: Sequence[Op], moved: Container[int]) -> frozenset[int]:
    """Returns the ops of whose results slices may be computed again."""
    found: set[int] = set()
    wanted: set[int] = set()
    for op in reversed(ops):
        if is_recomputed(op) and (op.results[0] in moved or op.results[0] in wanted):
            found.add(op.id)
            wanted.update(op.operands)
    return frozenset(found)


def whole(made: TensorSharding, shape: Sequence[int], full: Sequence[int]) -> TensorSharding:
    """Returns a result's sharding without the splits of dimensions along which an operand is repeated."""
    return tuple(own if size == count else () for own, size, count in zip(made, shape, full, strict=True))
