"""Which rows of every batch a process is to give, so that a source can be set up for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from spmdctx.data.blocks import part_of
from spmdctx.data.targets import targets_of
from spmdctx.errors import PlanError


class ProcessShard(NamedTuple):
    """Part `shard_index` of `shard_count` equal parts of the data, `rows` in each batch."""

    shard_index: int
    shard_count: int
    rows: int


def process_shard(target: Any, *, process: int | None = None) -> ProcessShard:
    """Which part of the data a process reads where each gives its own rows: processes that hold the same rows have the same index.

    It is what a source is sharded by: `grain.sharding.ShardOptions(own.shard_index, own.shard_count)`. `jax.process_index()` is not,
    where a mesh axis that splits no rows spans processes. With full_batch it is part 0 of 1.

    Args:
        target: a planned step or a Plan, as for `spmdctx.data.shard`.
        process: its number; by default this process.

    Raises:
        PlanError: nothing was planned, or no leaf of the batch has rows.
    """
    targets = targets_of(target)
    leaf = next((leaf for leaf in targets.flat if leaf.shape), None)
    if leaf is None or leaf.shape is None:
        raise PlanError("The plan has no batch leaf with rows.", need="a planned step, or a Plan, whose batch has rows")
    process = jax.process_index() if process is None else process
    if targets.whole:
        return ProcessShard(0, 1, leaf.shape[0])
    number = jax.process_count()
    held = [part_of(leaf.sharding, leaf.shape, other).dims[0] for other in range(number)]
    parts = sorted(set(held))
    return ProcessShard(parts.index(held[process]), len(parts), sum(stop - start for start, stop in held[process]))
