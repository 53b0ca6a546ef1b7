"""How much work a search within a memory budget is worth."""

from __future__ import annotations

from typing import NamedTuple

from spmdctx.search.dynamic.branching import SHORT_WORK, WORK


class Pace(NamedTuple):
    """The limits of one search within a budget.

    Attributes:
        rounds: limits that are tried for what the solver does not count.
        effort: of the solver.
        tolerance: the gap, relative to the cost, that is near enough.
        only_stored: whether the solver counts only what is stored.
        counts_copies: whether it counts what ops copy for themselves, where that is too much.
        branches: whether plans are tried one by one where what is counted does not suffice.
        work: of the branching.
        stops_at_first: whether the first mesh with a plan will do.
        proves: whether what is left to prove of the plan is worth more effort; where no plan is found, one of any cost is looked for.
        insists: the gap, relative to the cost, above which the plan's problem is solved once more, with more effort.
        hasty_rounds: of a hasty search that comes first, whose plan it improves; 0 for none.
        gives_up: whether there is no plan where that search finds none.
        enough: the gap, relative to the bound, of a plan that is not worth another search, on the same mesh or on others.
    """

    rounds: int = 12
    effort: int = 2
    tolerance: float = 0.0
    only_stored: bool = False
    counts_copies: bool = True
    branches: bool = False
    work: int = WORK
    stops_at_first: bool = False
    proves: bool = False
    insists: float = float("inf")
    hasty_rounds: int = 0
    gives_up: bool = False
    enough: float = 0.0


PROVEN = Pace(branches=True, proves=True)
"""A small program's cheapest plan, with every proof."""

ANY = Pace(tolerance=1.0, branches=True, work=SHORT_WORK, stops_at_first=True)
"""A small program's plan whose cost matters little."""

HASTY = Pace(rounds=4, effort=0, tolerance=0.03, only_stored=True, counts_copies=False, stops_at_first=True)
"""A plan of a program that is not small, in little time."""

THOROUGH = Pace(insists=0.01, hasty_rounds=HASTY.rounds)
"""The plan of a program that is not small; its hasty search is that of errors, so what they name is met."""

SOFT = Pace(effort=1, counts_copies=False)
"""A small program's plan within a budget that nobody set."""

QUICK = SOFT._replace(rounds=4, tolerance=0.005, hasty_rounds=2, enough=0.01)
"""The same of a program that is not small."""
