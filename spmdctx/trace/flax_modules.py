"""Flax, imported on first use: a program on plain pytrees needs none of it, and importing it takes as long as planning a small step."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any


class _Lazy:
    """Stands for a module until one of its names is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._name), name)
        # The next look-up finds the name here.
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    from flax import linen, nnx
    from flax.core import meta
else:
    linen, nnx, meta = _Lazy("flax.linen"), _Lazy("flax.nnx"), _Lazy("flax.core.meta")


def flax_is_used() -> bool:
    """Returns whether anything has imported Flax; before that, no object is one of Flax's, and no context of Flax is open."""
    return "flax" in sys.modules


__all__ = ["flax_is_used", "linen", "meta", "nnx"]
