"""Marks of `shard()` regions in the graph, and what they pin: a common mesh and a sharding per marked value."""

from __future__ import annotations

from typing import NamedTuple

Strategy = tuple[int, ...]
"""Slices per dimension, as in MindSpore."""


class Mark(NamedTuple):
    """One `shard()` marker in the graph: the identity op that stands for it and the value it marks (the op's result).

    `side` is "in", "out" or "parameter", with "_grad" appended on the cotangent's marker. `index` counts the region's
    flattened arguments or results. `strategy` is None (free), a tuple of slices per dimension, or a Layout.
    """

    op: int
    value: int
    region: int
    side: str
    index: int
    strategy: object
    label: str
