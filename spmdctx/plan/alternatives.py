"""Declares what a plan asks of its search: alternatives of a value or an op, and what would make one of them win."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spmdctx.search.whatif.alternatives import Alternative, Flip

__all__ = ["Alternative", "Alternatives", "Flip"]


class Alternatives(Protocol):
    """The alternatives of one plan, priced on request; `search.whatif.alternatives.PricedAlternatives` implements it.

    A delta is that of the whole step: the value or op is forced, and everything that may move is chosen anew.
    """

    def of_value(self, value: int) -> Sequence[Alternative]:
        """Returns other shardings of a value of the graph, the fastest first."""

    def of_op(self, op: int) -> Sequence[Alternative]:
        """Returns other ways to split an op, the fastest first."""

    def flips(self, alternative: Alternative) -> Sequence[Flip]:
        """Returns the changes that would make the alternative the better choice."""
