"""Seconds below which no cut of a loss into so many stages can run, whatever the order of its tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_HALVINGS = 60


def least_makespan_of_cuts_s(seconds: Sequence[float], num_stages: int, num_micro: int, *, splits: bool) -> float:
    """Returns the least time of micro-batches on stages, minimised over all cuts.

    A stage starts when the first micro-batch has passed those before it, runs all its micro-batches, and the last gradient passes back
    through those before it. So with stages of t seconds for both passes, a step takes at least `max_s (sum_{r<s} t_r + m t_s)`.

    Args:
        seconds: of each equation of the line, both passes together, one micro-batch.
        num_stages: stages.
        num_micro: micro-batches, m.
        splits: True if stages have several chunks, or gradients of weights come later: then only the mean load of stages is a bound.
    """
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, np.float64))])
    total = float(ends[-1])
    low, high = num_micro * total / num_stages, num_micro * total
    if splits or num_stages == 1:
        return low
    low = max(low, total)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _reaches(ends, middle, num_stages, num_micro):
            high = middle
        else:
            low = middle
    return low


def _reaches(ends: np.ndarray, limit: float, num_stages: int, num_micro: int) -> bool:
    """Returns whether so many stages hold all equations if each is as large as a limit on the makespan allows."""
    place = 0
    for _ in range(num_stages):
        before = ends[place]
        place = int(np.searchsorted(ends, before + (limit - before) / num_micro * (1 + 1e-12), side="right")) - 1
    return place >= len(ends) - 1
