"""Fits pipelines that are planned for speed into the memory of a device, the most promising first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from spmdctx.pipeline.search.counts import Candidate, Choices
from spmdctx.pipeline.search.schedules import NOT_HERE, PLAIN, reason_of
from spmdctx.wording import seconds_text

NO_MORE = "1f1b has no more micro-batches in flight, and does not fit"


def fit_promising(
    choices: Choices, planned: Sequence[Candidate], fit: Callable[[Candidate], Candidate], memory_bytes: int, *, is_binding: bool
) -> None:
    """Plans pipelines again within the memory of a device until none that is left can be faster, and adds all to the choices.

    A plan within the memory is taken to be no faster than that without a limit. No other schedule has fewer micro-batches in flight than
    1F1B on its fullest stage. So 1F1B comes first until something fits, and next on as many stages as a schedule does not fit. Where 1F1B
    does not fit, no other one on as many stages is planned again.

    Args:
        choices: what is planned and fits so far.
        planned: pipelines that are planned whatever memory they take.
        fit: plans one again within the memory, or raises one of `NOT_HERE`.
        memory_bytes: of a device.
        is_binding: whether what does not fit is no choice.
    """
    choices.candidates.extend(own for own in planned if own.memory_bytes <= memory_bytes)
    left = sorted((own for own in planned if own.memory_bytes > memory_bytes), key=lambda own: (own.seconds, own.stages))
    doubtful, hopeless = set[int](), set[int]()
    while left and left[0].seconds < choices.best_s(memory_bytes):
        own = _next(left, doubtful, is_known=math.isfinite(choices.best_s(memory_bytes)))
        left.remove(own)
        if own.stages in hopeless:
            _leave(choices, own, NO_MORE, is_binding=is_binding)
            continue
        try:
            found = fit(own)
        except NOT_HERE as error:
            choices.refused[own.name] = reason_of(error)
            found = own
        else:
            choices.candidates.append(found)
        if found.memory_bytes > memory_bytes:
            (hopeless if own.schedule == PLAIN.name else doubtful).add(own.stages)
    for own in left:
        _leave(choices, own, f"without a limit of memory it takes {seconds_text(own.seconds)}", is_binding=is_binding)


def _next(left: Sequence[Candidate], doubtful: Collection[int], *, is_known: bool) -> Candidate:
    """Returns the fastest one that is left; or the fastest 1F1B while nothing is known to fit, or on stages where something did not."""
    first = left[0]
    if is_known and first.stages not in doubtful:
        return first
    return next((own for own in left if own.schedule == PLAIN.name and (not is_known or own.stages == first.stages)), first)


def _leave(choices: Choices, own: Candidate, reason: str, *, is_binding: bool) -> None:
    """Keeps a plan that does not fit as a choice for want of any that does, or says why it is left out."""
    if is_binding:
        choices.skipped[own.name] = reason
    else:
        choices.candidates.append(own)
