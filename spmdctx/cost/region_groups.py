"""Names the collectives of `shard(fusion=)` that no backend groups; `cost.price.groups` finds the groups."""

from __future__ import annotations

from collections.abc import Mapping

from spmdctx.cost.bill import Bill
from spmdctx.ir.graph import Graph, item_bytes
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.reshard import reshard_steps


def ungrouped_note(graph: Graph, bill: Bill, mesh: LogicalMesh, *, all_to_all: bool) -> list[str]:
    """Returns a note on each fusion number whose regions move values by anything but a sum, which no backend groups by number."""
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
