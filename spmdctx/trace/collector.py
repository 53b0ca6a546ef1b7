"""Pauses the cyclic garbage collector for code that makes many objects and no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pauses the cyclic garbage collector.

    Flattening and planning make tens of thousands of small objects and no cycles; the collector would double their time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled and gc.get_freeze_count() == 0:
            # Moves the plan to the oldest generation, where it belongs, without a walk through all of its objects.
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
