"""The work that searches may do together, counted in additions, so that it is the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

CALL = 8_000
"""Additions that take as long as one small array operation does beyond its additions."""


@dataclass(slots=True)
class Allowance:
    """Additions that may be made, and those that were made.

    A search within memory that has spent all of them shows its best choice of states to `extend`, which may raise `most`.
    """

    most: float = math.inf
    spent: float = 0.0
    extend: Callable[[tuple[int, ...]], None] | None = None

    def is_spent(self) -> bool:
        """Returns whether no more may be made."""
        return self.spent >= self.most

    @property
    def left(self) -> float:
        """The additions that may still be made, at least 0."""
        return max(0.0, self.most - self.spent)

    def charge(self, additions: float) -> None:
        """Counts additions that are made."""
        self.spent += additions
