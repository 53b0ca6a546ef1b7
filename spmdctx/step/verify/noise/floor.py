"""The noise floor of one result: how far samples moved each of its elements, and what of a difference is above that."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

FACTOR = 5.0
"""How many times its noise an element may differ: the noise is the largest of some samples, and the difference is one more."""

CHAOTIC = 1.0
"""Noise, relative to the largest element of a result, from which any element may be moved so far: a deep network in bfloat16 does that."""

LEAST = 1e-3
"""Floor for the size of a result in relative differences."""

_SPACINGS = 4.0
"""Spacings of its own type that an element may always differ: its last operation may round otherwise."""


class Excess(NamedTuple):
    """The elements of a result that differ by more than their noise.

    Attributes:
        num_over: how many do.
        num_allowed: how many may, since the samples themselves do so among each other.
    """

    num_over: int
    num_allowed: int

    @property
    def ok(self) -> bool:
        """True if no more do than may."""
        return self.num_over <= self.num_allowed


class Floor:
    """What samples of the noise did to one result.

    Args:
        reference: the result itself, of the one-device step.
        spacing: of the result's type at 1; None for whole numbers and keys, which do not round.
    """

    def __init__(self, reference: np.ndarray, spacing: float | None) -> None:
        self.reference = reference
        self._least = np.zeros(reference.shape) if spacing is None else _SPACINGS * spacing * np.nan_to_num(np.abs(reference), posinf=0.0)
        self._first = np.zeros(reference.shape)
        self._second = np.zeros(reference.shape)
        self.num_samples = 0

    def add(self, sample: np.ndarray) -> None:
        """Takes one sample of the result."""
        moved = distances(sample, self.reference)
        self._second = np.maximum(self._second, np.minimum(moved, self._first))
        self._first = np.maximum(self._first, moved)
        self.num_samples += 1

    @property
    def noise(self) -> np.ndarray:
        """The largest distance of each element in any sample."""
        return self._first

    @property
    def _is_chaotic(self) -> bool:
        """True if rounding moves some element by the size of the whole result: then samples tell nothing of single elements."""
        if not np.issubdtype(self.reference.dtype, np.inexact) or not self.num_samples:
            return False
        largest = self._first.max(initial=0.0)
        return bool(largest >= CHAOTIC * np.abs(self.reference[np.isfinite(self.reference)]).max(initial=0.0) and 0 < largest < np.inf)

    def excess(self, differences: np.ndarray) -> Excess:
        """Compares differences with the noise, element by element.

        A difference is one more draw of the noise. Where single samples stand out from the others, it may too, as often and as far.
        """
        if self._is_chaotic:
            return Excess(int(np.count_nonzero(differences > FACTOR * self._first.max())), 0)
        over = differences > FACTOR * self._first + self._least
        alone = self._first > FACTOR * self._second + self._least
        num_alone = int(np.count_nonzero(alone))
        num_over = int(np.count_nonzero(over))
        if not num_alone or np.any(differences[over] > FACTOR * self._first[alone].max()):
            return Excess(num_over, 0)
        return Excess(num_over, 2 + math.ceil(4 * num_alone / self.num_samples))


def distances(values: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Returns |values - reference|, infinite where one is NaN or infinite and the other is not, or where whole numbers differ."""
    if not np.issubdtype(reference.dtype, np.inexact):
        return np.where(values == reference, 0.0, np.inf)
    same = (values == reference) | (np.isnan(values) & np.isnan(reference))
    with np.errstate(invalid="ignore"):
        away = np.abs(np.where(same, 0, values) - np.where(same, 0, reference))
    return np.where(np.isnan(away), np.inf, away)


def relative(distance: np.ndarray, reference: np.ndarray) -> float:
    """Returns the largest distance over the largest finite size of a result; for whole numbers, how many differ."""
    if not np.issubdtype(reference.dtype, np.inexact):
        return float(np.count_nonzero(distance))
    size = np.abs(reference[np.isfinite(reference)]).max(initial=0.0)
    return float(distance.max(initial=0.0) / max(size, LEAST))
