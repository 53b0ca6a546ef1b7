"""Arguments of which each device holds its own piece."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from spmdctx.trace.capture.capture import InputLeaf


def is_layerwise(leaf: InputLeaf, patterns: Sequence[str]) -> bool:
    """Returns whether each device holds its own piece of an argument, by the argument's metadata or a path pattern."""
    return leaf.layerwise or any(_matches(leaf.path, pattern) for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    return fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}")
