"""The partitioner makes the whole of a constrained tensor, even for readers that want a slice of it.

What XLA does: the price of a tensor that element-wise ops compute only on the way into other ops assumes that each reader computes it for
    itself (`machine.xla.fusion`). A constraint makes it exist: XLA then writes all of it, converted values in their wider type.
Seen in: libtpu 0.0.42. How much that costs: not measured.
Switch: none: all backends
Priced by: nothing
Written or prevented by: lowering.rewrite.rewriter makes the readers' slices from slices of the operands, within one computation.
Checked by: tests/machine/xla/partitioner/test_recompute.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.projection import project
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.rules.elementwise import ELEMENTWISE


def is_recomputed(op: Op) -> bool:
    """Returns whether an op is element-wise and its one result only exists on the way into other ops."""
    return len(op.results) == 1 and op.primitive in ELEMENTWISE and bool(op.fused >> len(op.operands) & 1)


def recomputed_values(graph: Graph, *, all_to_all: bool) -> frozenset[int]:
    """Returns the values of which readers may compute slices for themselves.

    XLA makes an operand that an op repeats along dimensions of size 1 once for all copies of the op. It moves it between their shardings,
    by all-to-all too: without `all_to_all`, what such ops make is not computed again.
    """
    return frozenset(op.results[0] for op in graph.ops if is_recomputed(op) and (all_to_all or not _repeats(graph, op)))


def _repeats(graph: Graph, op: Op) -> bool:
    shape = graph.values[op.results[0]].shape
    return any(value != LITERAL and graph.values[value].shape not in ((), shape) for value in op.operands)


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


def sliced_values(
    graph: Graph,
    scopes: Sequence[int],
    assignment: Assignment,
    recomputed: Collection[int],
    routed: Iterable[tuple[tuple[int, int], TensorSharding]] = (),
) -> frozenset[int]:
    """Returns the values from which slices of others are computed, and that are themselves taken as they are stored, then sliced.

    A computation can compute again what it makes itself; it takes what its callers and the calls in it make as that is stored.

    Args:
        graph: the step.
        scopes: the computation of each op.
        assignment: the shardings.
        recomputed: the values of which readers may compute slices.
        routed: values that ops of a computation take in a sharding on the way to the one that they need, as ((scope, value), sharding).
    """
    stored = assignment.values
    made = {(scopes[op.id], op.results[0]): op for op in graph.ops if op.results and op.results[0] in recomputed}
    wanted = [(*place, target) for place, target in routed if place in made and target != stored[place[1]]]
    for op in graph.ops:
        scope, axes = scopes[op.id], assignment.ops[op.id].axes
        for value, dims in zip(op.operands, op.rule.operands, strict=True):
            if (scope, value) in made and project(dims, axes) != stored[value]:
                wanted.append((scope, value, project(dims, axes)))
    found, seen = set(), set(wanted)
    while wanted:
        scope, value, target = wanted.pop()
        maker = made.get((scope, value))
        taken = slices(maker, target, stored) if maker is not None and refines(stored[value], target) else None
        if maker is None or taken is None:
            found.add(value)
            continue
        pairs = zip(maker.operands, taken, strict=True)
        new = [(scope, *pair) for pair in pairs if pair[0] != LITERAL and pair[1] != stored[pair[0]]]
        wanted += [one for one in new if one not in seen]
        seen.update(new)
    return frozenset(found)
