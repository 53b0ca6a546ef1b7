"""Tells which rows of every batch a process has to provide, so that a source can be set up for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from spmdctx.data.blocks import Bounds, part_of
from spmdctx.data.targets import Targets, targets_of
from spmdctx.errors import PlanError


class ProcessShard(NamedTuple):
    """Part `shard_index` of `shard_count` equal parts of the rows, `rows` in each batch.

    `ranges` has, per leaf of the batch and per dimension, what of the whole batch a process gives: (start, stop), one or more.
    """

    shard_index: int
    shard_count: int
    rows: int
    ranges: tuple[tuple[Bounds, ...], ...]


def process_shard(target: Any, *, process: int | None = None) -> ProcessShard:
    """Returns the part of the data that a process reads if each provides its own rows.

    Processes that hold the same rows have the same index. Shard a source by it:
    `grain.sharding.ShardOptions(own.shard_index, own.shard_count)`. `jax.process_index()` is wrong if a mesh axis that splits no
    rows spans processes. With full_batch the part is 0 of 1.

    Args:
        target: a planned step or a Plan, as for `spmdctx.data.shard`.
        process: the number of the process; by default this process.

    Raises:
        PlanError: nothing was planned, or no leaf of the batch has rows.
    """
    targets = targets_of(target)
    shapes = [leaf.shape for leaf in targets.flat]
    rows = next((index for index, shape in enumerate(shapes) if shape), None)
    if rows is None or any(shape is None for shape in shapes):
        raise PlanError("The plan has no batch leaf with rows.", need="a planned step, or a Plan, whose batch has rows")
    held = [_ranges(targets, process) for process in range(jax.process_count())]
    own = held[jax.process_index() if process is None else process]
    parts = sorted({ranges[rows][0] for ranges in held})
    return ProcessShard(parts.index(own[rows][0]), len(parts), sum(stop - start for start, stop in own[rows][0]), own)


def _ranges(targets: Targets, process: int) -> tuple[tuple[Bounds, ...], ...]:
    if targets.whole:
        return tuple(tuple(((0, size),) for size in leaf.shape or ()) for leaf in targets.flat)
    return tuple(part_of(leaf.sharding, leaf.shape or (), process).dims for leaf in targets.flat)
