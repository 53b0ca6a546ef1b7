"""The placement of values that depend on no input (positions, masks, tables).

Every device can make any block of such a value, so each takes the sharding that its readers want.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from spmdctx.ir.analysis.incidence import ends
from spmdctx.ir.graph import LITERAL
from spmdctx.ir.mesh import divides, replicated
from spmdctx.ir.projection import merge, project
from spmdctx.ir.sharding import Assignment, OpSharding, TensorSharding
from spmdctx.search.problem.space import Space
from spmdctx.search.setup.marks import PinnedDims


def place_free_values(space: Space, assignment: Assignment, pins: Mapping[int, PinnedDims]) -> Assignment:
    """Gives the free values of an assignment the sharding on which their readers agree, dimension by dimension.

    `pins` are the dimensions of slots that the user fixed.
    """
    if not space.free_slots:
        return assignment
    graph, slot_of, free = space.graph, space.slot_of, space.free_slots
    demands: dict[int, TensorSharding] = {}
    ops, values = list(assignment.ops), list(assignment.values)
    splits: dict[tuple[object, ...], OpSharding] = {}
    # Equal shardings share one object, by which their prices are memoised.
    same: dict[TensorSharding, TensorSharding] = {}
    fitting: dict[tuple[object, ...], TensorSharding] = {}
    for index in _around(space):
        op, slots = graph.ops[index], space.op_slots[index]
        if op.results and all(slot_of[value] in free for value in op.results):
            for value in op.results:
                wanted, pin = demands.get(slot_of[value]), pins.get(slot_of[value])
                alike = (space.shapes[value], wanted, pin)
                if alike not in fitting:
                    own = _fitting(space, value, wanted, pin)
                    fitting[alike] = same.setdefault(own, own)
                values[value] = fitting[alike]
            tensors = [(dims, values[value]) for dims, value in zip(op.rule.results, op.results, strict=True)]
            key = (id(op.rule), *(sharding for _, sharding in tensors))
            split = splits.get(key)
            if split is None:
                split = splits[key] = OpSharding(merge(op.rule, tensors, space.splittable(op.rule), space.mesh))
            ops[index] = split
        for position, slot in enumerate(slots[: len(op.operands)]):
            if slot in free:
                wanted = project(op.rule.operands[position], ops[index].axes)
                known = demands.get(slot)
                if known is None:
                    demands[slot] = wanted
                elif known != wanted:
                    demands[slot] = tuple(a if a == b else () for a, b in zip(known, wanted, strict=True))
    return Assignment(tuple(ops), tuple(values), assignment.mode)


def _around(space: Space) -> list[int]:
    """Returns the ops that read or make a value that is free to place, the last one first."""
    every = ends(space.graph)
    free = np.zeros(len(space.slot_of) + 1, dtype=bool)
    free[list(space.free_slots)] = True
    met = np.zeros(len(space.graph.ops), dtype=bool)
    met[every.ops[free[np.array([*space.slot_of, LITERAL])[every.values]]]] = True
    found: list[int] = np.flatnonzero(met)[::-1].tolist()
    return found


def _fitting(space: Space, value: int, wanted: TensorSharding | None, pin: PinnedDims | None) -> TensorSharding:
    shape = space.graph.values[value].shape
    own = wanted if wanted is not None and divides(shape, wanted, space.mesh) else replicated(len(shape))
    if pin is None:
        return own
    taken = {name for dim in pin if dim for name in dim}
    return tuple([fixed if fixed is not None else () if taken.intersection(dim) else dim for fixed, dim in zip(pin, own, strict=True)])
