"""What a plan asks of whoever made it: alternatives of a value or an op, and what would make one of them win."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spmdctx.search.whatif.alternatives import Alternative, Flip

__all__ = ["Alternative", "Alternatives", "Flip"]


class Alternatives(Protocol):
    """Alternatives of one plan, worked out when they are asked for; `search.whatif.alternatives.PricedAlternatives` is one.

    Deltas are those of the whole step when the value (or op) is forced and everything that may move is chosen anew.
    """

    def of_value(self, value: int) -> Sequence[Alternative]:
        """Other shardings of a value of the graph, the fastest first."""

    def of_op(self, op: int) -> Sequence[Alternative]:
        """Other ways to split an op, the fastest first."""

    def flips(self, alternative: Alternative) -> Sequence[Flip]:
        """What would make the alternative the better choice."""
