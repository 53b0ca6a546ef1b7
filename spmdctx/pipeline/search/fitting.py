"""Fits pipelines that are planned for speed into the memory of a device, the most promising first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmdctx.pipeline.search.counts import Candidate, Choices
from spmdctx.pipeline.search.schedules import NOT_HERE, PLAIN, reason_of
from spmdctx.wording import seconds_text

NO_MORE = "1f1b has no more micro-batches in flight, and does not fit"


def fit_promising(
    choices: Choices, planned: Sequence[Candidate], fit: Callable[[Candidate], Candidate], memory_bytes: int, *, is_binding: bool
) -> None:
    """Plans pipelines again within the memory of a device until none that is left can be faster, and adds all to the choices.

    A plan within the memory is taken to be no faster than that without a limit. No other schedule has fewer micro-batches in flight than
    1F1B on its fullest stage. So where a schedule does not fit, 1F1B comes next, and where that does not fit, no other one on as many
    stages is planned again.

    Args:
        choices: what is planned and fits so far.
        planned: pipelines that are planned whatever memory they take.
        fit: plans one again within the memory, or raises one of `NOT_HERE`.
        memory_bytes: of a device.
        is_binding: whether what does not fit is no choice.
    """
    left, failed = sorted(planned, key=lambda own: (own.seconds, own.stages)), set[tuple[int, str]]()
    while left and left[0].seconds < choices.best_s(memory_bytes):
        own = _next(left, failed)
        left.remove(own)
        if own.memory_bytes > memory_bytes and (own.stages, PLAIN.name) in failed:
            _leave(choices, own, NO_MORE, is_binding=is_binding)
            continue
        try:
            found = fit(own) if own.memory_bytes > memory_bytes else own
        except NOT_HERE as error:
            choices.refused[own.name] = reason_of(error)
            failed.add((own.stages, own.schedule))
            continue
        choices.candidates.append(found)
        if found.memory_bytes > memory_bytes:
            failed.add((own.stages, own.schedule))
    for own in left:
        if own.memory_bytes > memory_bytes:
            _leave(choices, own, f"without a limit of memory it takes {seconds_text(own.seconds)}", is_binding=is_binding)
        else:
            choices.candidates.append(own)


def _next(left: Sequence[Candidate], failed: set[tuple[int, str]]) -> Candidate:
    """Returns the fastest one that is left, or 1F1B on as many stages if another schedule did not fit there."""
    first = left[0]
    if any(stages == first.stages for stages, _ in failed):
        return next((own for own in left if (own.stages, own.schedule) == (first.stages, PLAIN.name)), first)
    return first


def _leave(choices: Choices, own: Candidate, reason: str, *, is_binding: bool) -> None:
    """Keeps a plan that does not fit as a choice for want of any that does, or says why it is left out."""
    if is_binding:
        choices.skipped[own.name] = reason
    else:
        choices.candidates.append(own)
