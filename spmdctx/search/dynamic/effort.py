"""The efforts of a search within a memory budget, and the schedules of attempts on each mesh, as data; and the limits that one tries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from spmdctx.cost.memory.reserved import ReservedShare
from spmdctx.search.dynamic.branching import SHORT_WORK, WORK
from spmdctx.search.problem.memory.reserved import at_least

_HOPELESS = 1e8
"""Additions that take a small part of a second."""

_PROOF = 40 * _HOPELESS
"""Additions that take a few seconds."""

FAR = 0.12
"""Share by which a plan costs more than a mesh's fastest, from which on memory decides which mesh is best."""


class Effort(NamedTuple):
    """The limits of one attempt.

    Attributes:
        rounds: limits that are tried to make room for bytes that the solver does not count.
        level: effort of the solver.
        tolerance: the gap, relative to the cost, that is near enough.
        only_stored: whether the solver counts only stored values.
        counts_copies: whether it counts the copies that ops make for themselves, if these do not fit.
        branches: whether plans are tried one by one if the counted bytes fit and the plan does not.
        work: of the branching.
        proves: whether a plan's remaining gap is worth one more level.
        insists: the gap, relative to the cost, above which the plan's problem is solved once more, one level higher.
        hopeless: the solver's additions on one mesh after which it ends if no plan was seen.
        limits_proofs: whether it ends then too if a plan was seen.
        leaves: share by which a plan then costs more than the mesh's fastest, from which on other meshes are searched first.
        refines: limits around that of the first plan that are tried too.
        proof: the solver's additions on one mesh once a plan was seen.
        mixes: whether layers of a plan that fits may follow others that the attempt has met.
    """

    rounds: int = 12
    level: int = 2
    tolerance: float = 0.0
    only_stored: bool = False
    counts_copies: bool = True
    branches: bool = False
    work: int = WORK
    proves: bool = False
    insists: float = float("inf")
    hopeless: float = float("inf")
    limits_proofs: bool = False
    leaves: float = float("inf")
    refines: int = 0
    proof: float = float("inf")
    mixes: bool = False


PROVEN = Effort(branches=True, proves=True, hopeless=2 * _HOPELESS)
"""For a small program's cheapest plan, with every proof."""

ANY = Effort(tolerance=1.0, branches=True, work=SHORT_WORK, hopeless=_HOPELESS, limits_proofs=True)
"""For a small program's plan whose cost matters little."""

REPAIRED = Effort(level=-1, tolerance=1.0, hopeless=1.5 * _HOPELESS, limits_proofs=True, refines=4)
"""For a plan found by changes of one node at a time, without bounds."""

BRIEF = PROVEN._replace(tolerance=1e-3, work=SHORT_WORK, limits_proofs=True)
"""For one of many plans of a small program."""

HASTY = Effort(rounds=4, level=0, tolerance=0.03, only_stored=True, counts_copies=False, hopeless=6 * _HOPELESS)
"""For a plan of a program that is not small, in little time."""

PRICED = HASTY._replace(rounds=1, tolerance=0.005, hopeless=_HOPELESS, limits_proofs=True)
"""For a bound at prices that are known, which tells meshes apart."""

THOROUGH = Effort(insists=0.01, hopeless=2 * _HOPELESS, proof=100 * _HOPELESS, mixes=True)
"""For the plan of a program that is not small."""

SOFT = Effort(level=1, counts_copies=False, hopeless=2 * _HOPELESS)
"""For a small program's plan within a budget that the user did not set."""

QUICK = SOFT._replace(rounds=4, tolerance=0.005, proof=2 * _PROOF, mixes=True)
"""The same for a program that is not small."""

PART = QUICK._replace(proof=_PROOF / 4)
"""The same for one of many parts that are planned one by one."""


class Standing(NamedTuple):
    """The state of the search of one mesh between two attempts.

    Attributes:
        known_s: cost of the cheapest plan of the other meshes, infinite where there is none.
        cost_s: cost of the plan that was found on this mesh, infinite where there is none.
        lower_bound_s: no plan within the budget costs less on this mesh.
        is_begun: whether an attempt was made.
        is_settled: whether it is proven that no plan fits, or that none is cheaper than `known_s`.
        has_run_out: whether the last attempt found no plan at any limit that it tried.
    """

    known_s: float
    cost_s: float = math.inf
    lower_bound_s: float = 0.0
    is_begun: bool = False
    is_settled: bool = False
    has_run_out: bool = False


def first(standing: Standing) -> bool:
    """Holds before any attempt."""
    return not standing.is_begun


def first_of_all(standing: Standing) -> bool:
    """Holds before any attempt, where no other mesh has a plan."""
    return not standing.is_begun and math.isinf(standing.known_s)


def first_beside_others(standing: Standing) -> bool:
    """Holds before any attempt, where another mesh has a plan that this one must beat."""
    return not standing.is_begun and not math.isinf(standing.known_s)


def out_of_limits(standing: Standing) -> bool:
    """Holds where the last attempt tried all of its limits and found no plan."""
    return standing.has_run_out


def improvable(standing: Standing, enough: float = 0.0) -> bool:
    """Holds where a plan was found that is farther from its bound than the share `enough`."""
    return not math.isinf(standing.cost_s) and min(standing.cost_s, standing.known_s) > standing.lower_bound_s * (1 + enough)


def unsettled(standing: Standing, enough: float = 0.0) -> bool:
    """Holds where a plan was found that is improvable, or none that may exist and be cheaper than another mesh's by more than `enough`."""
    if math.isinf(standing.cost_s):
        return standing.is_begun and not standing.is_settled and standing.known_s > standing.lower_bound_s * (1 + enough)
    return improvable(standing, enough)


class Attempt(NamedTuple):
    """One search of a mesh: its effort, and the condition under which it is made."""

    effort: Effort
    when: Callable[[Standing], bool] = first


class Schedule(NamedTuple):
    """The way in which meshes are searched within a budget.

    Attributes:
        attempts: those made on each mesh, in this order.
        later: those made when all meshes had theirs, on the meshes that may still have the best plan.
        stops_at_first: whether the search ends at the first mesh with a plan.
        enough: the gap, relative to the bound, at which a plan makes the search of another mesh not worthwhile.
        repairs: the solver's additions on all meshes together that go into `REPAIRED` before the attempts.
        hopeless: the solver's additions on all meshes together; see `Effort.hopeless`.
        proof: the solver's additions on all meshes together once a plan was seen; then the best plan has a gap. A mesh gets half of what
            is left.
    """

    attempts: tuple[Attempt, ...]
    later: tuple[Attempt, ...] = ()
    stops_at_first: bool = False
    enough: float = 0.0
    repairs: float = 0.0
    hopeless: float = 12 * _HOPELESS
    proof: float = math.inf


REPAIRED_PLAN = Schedule((Attempt(REPAIRED),))
_FEW = ANY._replace(hopeless=_HOPELESS / 2)
ANY_PLAN = Schedule((Attempt(ANY),), stops_at_first=True, repairs=3 * _HOPELESS)
ENOUGH_PLAN = Schedule((Attempt(_FEW),), stops_at_first=True, repairs=2 * _HOPELESS, hopeless=_HOPELESS / 2)
ENOUGH_DEVICES = ENOUGH_PLAN._replace(repairs=_HOPELESS)
HASTY_PLAN = Schedule((Attempt(HASTY),), stops_at_first=True)
SHORT_HASTY_PLAN = Schedule((Attempt(HASTY._replace(hopeless=2 * _HOPELESS)),), stops_at_first=True)

BRIEF_PLAN = Schedule((Attempt(BRIEF),), enough=BRIEF.tolerance, repairs=_HOPELESS, hopeless=_HOPELESS / 2, proof=100 * _HOPELESS)
BRIEF_LARGE_PLAN = Schedule((Attempt(HASTY._replace(limits_proofs=True)),))

# An error names the budget of a plan that is found without proofs.
PROVEN_PLAN = Schedule((Attempt(PROVEN), Attempt(ANY, out_of_limits)), repairs=3 * _HOPELESS, hopeless=3 * _HOPELESS, proof=_PROOF)

# The first attempt is that of HASTY_PLAN, or goes on where a shorter one ends, so it meets a budget that an error names.
# If another mesh has a plan, this one must beat it.
THOROUGH_PLAN = Schedule(
    (
        Attempt(HASTY._replace(mixes=True), first_of_all),
        Attempt(HASTY._replace(mixes=True, tolerance=THOROUGH.tolerance), first_beside_others),
    ),
    later=(Attempt(THOROUGH, unsettled),),
)

MIDDLE_PLAN = THOROUGH_PLAN._replace(repairs=3 * _HOPELESS, hopeless=4 * _HOPELESS, proof=_PROOF / 2)

SOFT_PLAN = Schedule((Attempt(SOFT),))

_ENOUGH = 0.01
_SHORT = HASTY._replace(rounds=2, leaves=FAR, proof=_PROOF, mixes=True)
_SHORT_ATTEMPTS = (Attempt(_SHORT, first_of_all), Attempt(_SHORT._replace(tolerance=QUICK.tolerance), first_beside_others))

# A larger program has a plan near enough to its bound long before it has the best one.
LARGEST_PLAN = THOROUGH_PLAN._replace(later=(Attempt(THOROUGH, partial(unsettled, enough=_ENOUGH / 2)),))
LARGE_PLAN = LARGEST_PLAN._replace(proof=4 * _PROOF)

QUICK_PLAN = Schedule(_SHORT_ATTEMPTS, later=(Attempt(QUICK, partial(unsettled, enough=_ENOUGH)),), enough=_ENOUGH)

ROUGH_PLAN = Schedule(_SHORT_ATTEMPTS, enough=_ENOUGH)

# If a short attempt finds no plan of a large program within a budget that the user did not set, the search gives up.
QUICK_PLAN_OR_NONE = Schedule(_SHORT_ATTEMPTS, later=(Attempt(QUICK, partial(improvable, enough=_ENOUGH)),), enough=_ENOUGH)

# Of many parts that are planned one by one, what a short attempt leaves is worth no long search.
PART_PLAN = QUICK_PLAN._replace(later=(Attempt(PART, partial(unsettled, enough=HASTY.tolerance)),))
PART_PLAN_OR_NONE = QUICK_PLAN_OR_NONE._replace(later=(Attempt(PART, partial(improvable, enough=HASTY.tolerance)),))


class Limits:
    """The limits that are left to try: limits up to `low` are too low, and plans with `high` counted bytes are known.

    With `reserved` (`search.problem.memory.reserved`), what is counted is an estimate, and proves nothing.
    """

    def __init__(self, full: float, spacing: float) -> None:
        self.limit = self.high = self.full = full
        self.low, self.spacing = 0.0, spacing
        self.reserved: tuple[ReservedShare, ...] = ()
        self.ignores_reserved = False
        self._instead: tuple[float, float] | None = None

    @property
    def is_full(self) -> bool:
        """Returns whether the limit is the whole budget."""
        return self.limit == self.full

    @property
    def proves(self) -> bool:
        """Returns whether no plan in the budget is outside of what is searched."""
        return self.is_full and not self.reserved

    @property
    def is_exhausted(self) -> bool:
        """Returns whether too little is left to try."""
        return self.high - self.low <= self.spacing

    def raise_to(self, low: float) -> None:
        """Goes on above a limit that is too low."""
        self.low = low
        self.limit = (low + self.high) / 2

    def lower_to(self, high: float, limit: float) -> None:
        """Goes on below a plan with `high` counted bytes, at a limit if that is not too low."""
        self.high = high
        limit = min(self.limit - self.spacing, limit)
        self.limit = limit if limit > self.low else (self.low + high) / 2

    def reserve(self, pieces: Sequence[ReservedShare], high: float, limit: float) -> None:
        """Counts what a plan reserves for results; notes where to go on without that: below its `high` bytes, at a limit."""
        self.reserved, self._instead = at_least(self.reserved, pieces), (high, limit)

    def without_reserved(self) -> None:
        """Goes on with plain rows at a lower limit, as too much was counted."""
        self.reserved, self.ignores_reserved = (), True
        if self._instead is not None:
            self.lower_to(*self._instead)
