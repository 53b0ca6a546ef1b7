"""Groups the sums of `shard(fusion=)` in the forward and the backward pass: those that do not wait for each other are reduced together.

Gradients have buckets of their own (`cost.price.gradients`). Every other sum that ops leave partial belongs to the group of its number (0
outside of such regions) and of its level. The level counts the sums that it is computed from, one after the other.
"""

from __future__ import annotations

from collections.abc import Container

from spmdctx.ir.graph import LITERAL, Graph
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import partial_axes
from spmdctx.ir.sharding import Assignment


def region_groups(graph: Graph, assignment: Assignment, mesh: LogicalMesh, gradients: Container[int]) -> dict[int, int]:
    """Returns the group of each sum; the group that runs first has the highest number. Levels without a region's sum have no groups.

    Args:
        graph: the step.
        assignment: its shardings.
        mesh: the mesh.
        gradients: sums that make up gradients.
    """
    if not any(graph.origins[op.id].fusion for op in graph.ops):
        return {}
    level = [0] * len(graph.values)
    groups: dict[tuple[int, int], list[int]] = {}
    for op in graph.ops:
        deepest = max((level[value] for value in op.operands if value != LITERAL), default=0)
        partial = any(mesh.sizes[name] > 1 for name in partial_axes(op.rule, assignment.ops[op.id].axes))
        is_member = partial and op.rule.combiner == "add" and len(op.results) == 1 and op.results[0] not in gradients
        for value in op.results:
            level[value] = deepest + is_member
        if is_member:
            groups.setdefault((deepest, graph.origins[op.id].fusion), []).append(op.results[0])
    numbered = {deepest for deepest, number in groups if number}
    kept = [own for (deepest, _), own in sorted(groups.items()) if deepest in numbered]
    return {value: len(kept) - 1 - place for place, own in enumerate(kept) for value in own}
