"""Arguments of which each device holds its own piece."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from spmdctx.trace.capture.capture import InputLeaf


def is_layerwise(leaf: InputLeaf, patterns: Sequence[str]) -> bool:
    """Returns whether each device holds its own piece of an argument, by the argument's metadata or a path pattern."""
    return leaf.layerwise or any(matches_path(leaf.path, pattern) for pattern in patterns)


def matches_path(path: str, pattern: str) -> bool:
    """Returns whether a pattern fits a whole path or the end of it."""
    return fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}")
