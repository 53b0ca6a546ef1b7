"""Which sums of `shard(fusion=)` are reduced together in the forward and the backward pass: those that do not wait for each other.

Gradients have buckets of their own (`gradient_order`). Everything else that ops leave partial belongs to the group of its number (0
outside of such regions) and of its level, which counts the sums that it is computed from, one after the other.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from spmdctx.cost.bill import Bill
from spmdctx.ir.graph import LITERAL, Graph, item_bytes
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import partial_axes
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.reshard import reshard_steps


def region_groups(graph: Graph, assignment: Assignment, mesh: LogicalMesh, gradients: Container[int]) -> dict[int, int]:
    """Per sum the number of its group; the first that runs has the highest. Levels without a region's sum have no groups.

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


def ungrouped_note(graph: Graph, bill: Bill, mesh: LogicalMesh, *, all_to_all: bool) -> list[str]:
    """Names what regions with a fusion number move otherwise than by a sum, which no backend groups by number."""
    kinds: dict[int, dict[str, int]] = {}
    for move in bill.moves:
        number = graph.origins[move.op].fusion
        if not number or not move.time_s:
            continue
        known = graph.values[move.value]
        for step in reshard_steps(known.shape, item_bytes(known.dtype), move.source, move.target, mesh, all_to_all):
            if step.kind != "slice":
                own = kinds.setdefault(number, {})
                own[step.kind] = own.get(step.kind, 0) + 1
    return [
        f"shard(fusion={number}) groups what its ops reduce; its {_listed(own)} XLA combines as it likes: no backend does so by number."
        for number, own in sorted(kinds.items())
    ]


def _listed(kinds: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
