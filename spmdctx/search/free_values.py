"""Values that depend on no input (positions, masks, tables): every device can make any block of them, so they go as their readers ask."""

from __future__ import annotations

from spmdctx.ir import Assignment, OpSharding, TensorSharding
from spmdctx.mesh import divides, replicated
from spmdctx.search.space import Space
from spmdctx.search.transfer import FactorAxes, merge, project


def place_free_values(space: Space, assignment: Assignment) -> Assignment:
    """Gives the free values of an assignment the sharding on which their readers agree, dimension by dimension."""
    if not space.loose_slots:
        return assignment
    graph, slot_of = space.graph, space.slot_of
    demands: dict[int, TensorSharding] = {}
    ops, values = list(assignment.ops), list(assignment.values)
    memo: dict[tuple[object, ...], FactorAxes] = {}
    for op in reversed(graph.ops):
        if op.results and all(slot_of[value] in space.loose_slots for value in op.results):
            for value in op.results:
                values[value] = _fitting(space, value, demands.get(slot_of[value]))
            tensors = [(dims, values[value]) for dims, value in zip(op.rule.results, op.results, strict=True)]
            key = (id(op.rule), *(sharding for _, sharding in tensors))
            axes = memo.get(key)
            if axes is None:
                axes = memo[key] = merge(op.rule, tensors, space.splittable(op.rule), space.mesh)
            ops[op.id] = OpSharding(axes)
        for position, slot in enumerate(space.op_slots[op.id][: len(op.operands)]):
            if slot in space.loose_slots:
                wanted = project(op.rule.operands[position], ops[op.id].axes)
                known = demands.get(slot)
                demands[slot] = wanted if known is None else tuple(a if a == b else () for a, b in zip(known, wanted, strict=True))
    return Assignment(tuple(ops), tuple(values), assignment.mode)


def _fitting(space: Space, value: int, wanted: TensorSharding | None) -> TensorSharding:
    shape = space.graph.values[value].shape
    if wanted is None:
        return replicated(len(shape))
    return wanted if divides(shape, wanted, space.mesh) else replicated(len(shape))
