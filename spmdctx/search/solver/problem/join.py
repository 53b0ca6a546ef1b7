"""The minimum of a sum of tables over one of their variables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmdctx.ir.arrays import FloatArray

CHUNK = 1 << 17
"""Entries that are formed at a time, so that they stay in the processor's cache."""
_WIDE = 1 << 14
"""Entries of a result from which the states of the variable are added one at a time, in place."""


def least(factors: Sequence[tuple[tuple[int, ...], FloatArray]], num_places: int) -> FloatArray:
    """Minimises the sum of `factors` over the variable -1.

    Args:
        factors: The places of each factor's axes, -1 for the variable, and its array. Places ascend along a factor's axes; -1 comes first.
        num_places: The number of places of the result.

    Returns:
        The array over the places 0 to `num_places` - 1. The variable must occur in some factor.
    """
    views = sorted((_view(places, array, num_places) for places, array in factors), key=lambda view: view.size)
    shape = np.broadcast_shapes(*(view.shape for view in views))
    rest = int(np.prod(shape[1:], dtype=np.int64))
    if rest >= _WIDE and len(views) > 1:
        return _least_of_wide(views, shape)
    step = max(1, CHUNK // max(rest, 1))
    result: FloatArray | None = None
    for start in range(0, shape[0], step):
        part = _sum([view[start : start + step] if len(view) > 1 else view for view in views])
        lowest = part.min(axis=0)
        result = lowest if result is None else np.minimum(result, lowest, out=result)
    assert result is not None
    return np.ascontiguousarray(np.broadcast_to(result, shape[1:])) if result.shape != shape[1:] else result


def _least_of_wide(views: list[FloatArray], shape: tuple[int, ...]) -> FloatArray:
    """Forms the same sums in the same order, without a new array for each."""
    result, total = np.full(shape[1:], np.inf), np.empty(shape[1:])
    for state in range(shape[0]):
        parts = [view[state if len(view) > 1 else 0] for view in views]
        np.add(_sum(parts[:-1]), parts[-1], out=total)
        np.minimum(result, total, out=result)
    return result


def _view(places: tuple[int, ...], array: FloatArray, num_places: int) -> FloatArray:
    """Returns the array with an axis for the variable and for every place, of length 1 for those that it lacks."""
    shape = [1] * (num_places + 1)
    for place, length in zip(places, array.shape, strict=True):
        shape[place + 1] = length
    return array.reshape(shape)


def _sum(views: list[FloatArray]) -> FloatArray:
    """Adds small arrays first, so that few additions run over the whole result."""
    total = views[0]
    for view in views[1:]:
        total = total + view
    return total
