"""Notes on what the parallel optimizer leaves whole, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from spmdctx.ir.graph import Graph, Role
from spmdctx.search.setup.request import ALL_REPLICAS, OptimizerSharding

_MOST_NAMED = 16


def whole_notes(
    graph: Graph, asked: OptimizerSharding, small: Iterable[int], unfit: Mapping[int, int | None], split: Iterable[int]
) -> list[str]:
    """Returns a note for each reason to leave inputs whole.

    Args:
        graph: the graph.
        asked: the split that the user asked for.
        small: inputs below the threshold.
        unfit: inputs that do not divide, with the dimension that would be split; None if the replicas make no groups of the size asked for.
        split: inputs that are split.
    """
    size, named = asked.shard_size, {*small, *unfit, *split}
    limit = f"{asked.threshold_bytes // 1024} KB (parallel_optimizer_threshold)"
    replicas = "its replicas" if size == ALL_REPLICAS else f"{size} of its replicas (optimizer_weight_shard_size)"
    dims = {value: dim for value, dim in unfit.items() if dim is not None}
    others = [value for value in graph.inputs if graph.values[value].role is Role.STATE and value not in named]
    return [
        *_note(graph, small, f"holds less than {limit}"),
        *_note(graph, [one for one, dim in unfit.items() if dim is None], f"has no groups of {replicas}"),
        *_note(graph, dims, f"does not divide over {replicas}", dims),
        *_note(graph, others, "is no weight and no optimizer state"),
    ]


def _note(graph: Graph, values: Iterable[int], reason: str, dims: Mapping[int, int] | None = None) -> list[str]:
    """Returns what is left whole for a reason, with the dimension that is to blame if `dims` has it."""
    known = [own for own in (graph.values[value] for value in dict.fromkeys(values)) if math.prod(own.shape) > 1]
    if not known:
        return []
    listed = known if len(known) <= _MOST_NAMED else sorted(known, key=lambda own: own.num_bytes, reverse=True)[:_MOST_NAMED]
    named = {own.id: f"'{own.path}' {list(own.shape)}" for own in listed}
    names = ", ".join(named[own] if dims is None else f"{named[own]} by its dimension {dims[own]}" for own in named)
    more = f" and {len(known) - len(listed)} smaller" if len(known) > len(listed) else ""
    return [f"enable_parallel_optimizer leaves whole what {reason}: {names}{more}."]
