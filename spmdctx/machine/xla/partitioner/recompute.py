"""The partitioner makes the whole of a constrained tensor, even for readers that want a slice of it.

What XLA does: the price of a tensor that element-wise ops compute only on the way into other ops assumes that each reader computes it for
    itself (`machine.xla.fusion`). A constraint makes it exist: XLA then writes all of it, converted values in their wider type.
Seen in: libtpu 0.0.42. How much that costs: not measured.
Switch: none: all backends
Priced by: nothing
Written or prevented by: lowering.rewrite.rewriter makes the readers' slices from slices of the operands.
Checked by: tests/machine/xla/partitioner/test_recompute.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spmdctx.ir.graph import LITERAL, Op
from spmdctx.ir.projection import project
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.rules.elementwise import ELEMENTWISE


def is_recomputed(op: Op) -> bool:
    """Returns whether an op is element-wise and its one result only exists on the way into other ops."""
    return len(op.results) == 1 and op.primitive in ELEMENTWISE and bool(op.fused >> len(op.operands) & 1)


def refines(source: TensorSharding, target: TensorSharding) -> bool:
    """Returns whether every device's block under `target` is a part of its block under `source`."""
    return all(new[: len(own)] == own for own, new in zip(source, target, strict=True))


def operand_shardings(op: Op, target: TensorSharding) -> tuple[TensorSharding, ...] | None:
    """Returns the shardings of the operands from which an element-wise op makes its result in `target`.

    Returns None if a split dimension has several factors, or none.
    """
    axes: list[tuple[str, ...]] = [()] * len(op.rule.sizes)
    for own, factors in zip(target, op.rule.results[0], strict=True):
        if own and len(factors) != 1:
            return None
        for factor in factors:
            axes[factor] = own
    return tuple(project(dims, tuple(axes)) for dims in op.rule.operands)


def slices(op: Op, target: TensorSharding, stored: Sequence[TensorSharding]) -> tuple[TensorSharding, ...] | None:
    """Returns the shardings of the operands from which an op makes its result in `target`.

    Returns None if one of them is not a part of what each device has `stored` of the operand.
    """
    needed = operand_shardings(op, target)
    if needed is None:
        return None
    pairs = zip(op.operands, needed, strict=True)
    return needed if all(value == LITERAL or refines(stored[value], sharding) for value, sharding in pairs) else None


def sliced_values(ops: Sequence[Op], assignment: Assignment, routed: Iterable[tuple[int, TensorSharding]] = ()) -> frozenset[int]:
    """Returns the values from which slices of others are computed, and that are themselves taken as they are stored, then sliced.

    `routed` are values that some op takes in a sharding on the way to the one that it needs.
    """
    stored, made = assignment.values, {op.results[0]: op for op in ops if is_recomputed(op)}
    wanted = [(value, target) for value, target in routed if value in made and target != stored[value]]
    for op in ops:
        for value, dims in zip(op.operands, op.rule.operands, strict=True):
            if value in made and project(dims, assignment.ops[op.id].axes) != stored[value]:
                wanted.append((value, project(dims, assignment.ops[op.id].axes)))
    found, seen = set(), set(wanted)
    while wanted:
        value, target = wanted.pop()
        taken = slices(made[value], target, stored) if value in made and refines(stored[value], target) else None
        if taken is None:
            found.add(value)
            continue
        pairs = zip(made[value].operands, taken, strict=True)
        new = [pair for pair in pairs if pair[0] != LITERAL and pair[1] != stored[pair[0]] and pair not in seen]
        seen.update(new)
        wanted += new
    return frozenset(found)
