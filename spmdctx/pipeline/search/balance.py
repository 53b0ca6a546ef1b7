"""Moves cuts until the planned seconds of all chunks are about the same, where that makes the schedule shorter."""

from __future__ import annotations

import math

from spmdctx.pipeline.stages.staging import Stages, Staging, scaled

_ROUNDS = 3
"""How often cuts are moved at most."""

BALANCED = 1.02
"""Stages of which the longest takes at most so many times the mean are left as they are."""

_MOVED = 1.05
"""A schedule that takes more than so many times what it would without any moves is worth other cuts, even if its stages are balanced."""

_UNEVEN, _WORTH_UNEVEN = 1.25, 0.95
"""Multiple of the longest chunk's seconds that a chunk may take where moves take so long, and the part of the shortest schedule's time
that one with such chunks may be expected to take."""

_WORTH = 0.998
"""Other cuts are planned if their schedule is expected to take at most this part of the shortest one's time."""

_EVEN = 1.05
"""Each stage uses as many stacked layers as it keeps if the schedule takes at most so many times the shortest one's time."""


def balanced(staging: Staging) -> Stages:
    """Returns the planned stages of the shortest schedule that a few rounds of planning and cutting find.

    Of stacked layers, each stage uses those that it keeps if the schedule is about as short then: others cross in each step.
    """
    best = _shortest(staging)
    places = staging.even_places() if any(own.is_spread and not own.is_at_home for own in best.stacks) else None
    if places is None:
        return best
    seconds, most_s = scaled(staging.estimates, best.places, best.seconds), _EVEN * best.simulation.makespan_s
    if staging.expected_s(places, seconds, best) > most_s:
        return best
    even = staging.plan(places)
    is_near = even.simulation.makespan_s <= most_s and all(own.is_at_home for own in even.stacks)
    return even if is_near else best


def _shortest(staging: Staging) -> Stages:
    """Returns the planned stages of the shortest schedule.

    The first cut goes by estimates for one device. Then each equation takes its chunk's planned seconds, as far as it has a share in them.
    Cuts that balance stages better may move more bytes. So several are compared by the schedule that is expected of them, moves included,
    and the best one is planned. None of them makes the longest chunk longer, except where moves take long.
    """
    best = found = staging.plan()
    tried = {found.places}
    for _ in range(_ROUNDS):
        waits = best.simulation.makespan_s > _MOVED * best.unmoved_s
        if best.imbalance <= BALANCED and not waits:
            break
        seconds, most_s = scaled(staging.estimates, found.places, found.seconds), max(found.seconds) * (_UNEVEN if waits else 1.0)
        expected = [(staging.expected_s(places, seconds, found), places) for places in staging.proposals(seconds, most_s)]
        expected_s, places = min(expected, default=(math.inf, found.places))
        if places in tried or expected_s > (_WORTH_UNEVEN if waits else _WORTH) * best.simulation.makespan_s:
            break
        tried.add(places)
        found = staging.plan(places)
        best = min(best, found, key=lambda own: own.simulation.makespan_s)
    return best
