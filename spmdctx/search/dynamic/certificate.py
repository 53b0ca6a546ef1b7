"""What a search proved, as a bound of the plan's own price."""

from __future__ import annotations

from typing import NamedTuple

_ROUNDING = 1e-9
_WORTH_A_WORD = 1e-3


class Certificate(NamedTuple):
    """A bound of what a search minimised, and what it counted for the plan that it chose.

    Attributes:
        lower_bound_s: Nothing in the searched space is counted below it.
        counted_s: What the search counted for the plan; None where the plan was changed after the search.
    """

    lower_bound_s: float
    counted_s: float | None = None

    def of_price(self, total_s: float) -> tuple[float, str]:
        """The bound of the price, and what there is to say of it; empty where both count alike.

        Moves and sums that the compiler shares may make a plan cheaper than the search counted. What is counted too much for
        this plan may be for others, so the bound is lowered by as much.

        Args:
            total_s: Price of the plan.
        """
        surplus_s = 0.0 if self.counted_s is None else self.counted_s - total_s
        if surplus_s <= _ROUNDING * total_s:
            return self.lower_bound_s, ""
        bound_s = max(0.0, self.lower_bound_s - surplus_s)
        if surplus_s < _WORTH_A_WORD * total_s:
            return bound_s, ""
        more = f"The search counted {surplus_s / total_s:.1%} more for this plan than it costs, as the compiler shares moves"
        return bound_s, f"{more}; the lower bound is lowered by as much."


def gap_of(total_s: float, bound_s: float) -> float:
    """Relative distance of a price from its bound; 0 where only the order of additions differs."""
    gap = total_s / bound_s - 1 if bound_s else 0.0
    return 0.0 if abs(gap) < _ROUNDING else gap
