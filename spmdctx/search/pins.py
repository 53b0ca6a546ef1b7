"""Marks of `shard()` regions in the graph, and what they pin: a common mesh and a sharding per marked value."""

from __future__ import annotations

from spmdctx.ir import Mark

Strategy = tuple[int, ...]
"""Slices per dimension, as in MindSpore."""

__all__ = ["Mark"]
