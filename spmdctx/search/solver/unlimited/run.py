"""What all solves of one problem share: their limits, what they remember, and counts of what they did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spmdctx.search.solver.unlimited.eliminate import Memo

WORK = 1_000_000_000
"""Additions that one elimination may take."""

SWEEPS = (30, 20, 50, 100)
"""Sweeps of each round that improves a bound, before a look at it."""


@dataclass
class SolverRun:
    """The limits, memo and counts that all solves of one problem share.

    `work` limits one elimination, `rounds` the times that a bound is improved. `progress` is the share of the time
    that is over, `left` the seconds that are left. `keeps_states` says that messages keep the states that a bound shows to be useless,
    `has_momentum` that they gain momentum; a bound is `enough` that makes more sweeps pointless, and a minimum that is `useless` or less
    need not be found. Below the best cost by less than the share `worth`, a bound is not tightened around cycles.
    """

    effort: int = 2
    work: int = WORK
    rounds: int = len(SWEEPS)
    tolerance: float = 0.0
    cutoff: float = np.inf
    progress: Callable[[], float] = lambda: 0.0
    left: Callable[[], float | None] = lambda: None
    memo: Memo = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    keeps_states: bool = False
    enough: float = np.inf
    useless: float = -np.inf
    has_momentum: bool = False
    worth: float = 0.0

    def expired(self) -> bool:
        """Returns whether the time is over."""
        return self.progress() >= 1.0

    def count(self, name: str, number: int) -> None:
        """Adds to a count."""
        self.counts[name] = self.counts.get(name, 0) + number

    def reach(self, name: str, number: int) -> None:
        """Raises a count to a number if it is lower."""
        self.counts[name] = max(self.counts.get(name, 0), number)
