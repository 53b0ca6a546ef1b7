"""Chooses among planned numbers of stages, and says what would change the choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spmdctx.wording import bytes_text, counted, seconds_text


class Candidate(NamedTuple):
    """A step on some number of stages.

    Attributes:
        stages: their number; 1 is the step without a pipeline, which accumulates gradients.
        seconds: of a step.
        waiting_s: the part of them in which links are waited for.
        memory_bytes: the planned peak of the fullest device.
    """

    stages: int
    seconds: float
    waiting_s: float
    memory_bytes: int


def stage_counts(num_devices: int, most: int, num_micro: int) -> list[int]:
    """Returns the numbers of stages from 1 to `most` that divide the devices; none has more stages than there are micro-batches."""
    return [count for count in range(1, min(most, num_micro, num_devices) + 1) if num_devices % count == 0]


def best_of(candidates: Sequence[Candidate], memory_bytes: int) -> Candidate:
    """Returns the fastest one that fits into the memory of a device, with the fewest stages of equals, or the smallest if none fits."""
    fitting = [own for own in candidates if own.memory_bytes <= memory_bytes]
    if not fitting:
        return min(candidates, key=lambda own: (own.memory_bytes, own.stages))
    return min(fitting, key=lambda own: (own.seconds, own.stages))


def pareto(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns those that no other one beats in seconds and in bytes, the fastest first."""
    found: list[Candidate] = []
    for own in sorted(candidates, key=lambda one: (one.seconds, one.memory_bytes, one.stages)):
        if not found or own.memory_bytes < found[-1].memory_bytes:
            found.append(own)
    return found


def choice_notes(chosen: Candidate, candidates: Sequence[Candidate], refused: Mapping[int, str], most: int, memory_bytes: int) -> list[str]:
    """Returns what a user would want to know of the choice: all counts, and what would make another one better."""
    ordered = sorted(candidates, key=lambda own: own.stages)
    listed = "; ".join(f"{own.stages}: {seconds_text(own.seconds)}, {bytes_text(own.memory_bytes)}" for own in ordered)
    efficient = ", ".join(str(own.stages) for own in pareto(candidates))
    notes = [
        f"auto_pipeline chose {counted(chosen.stages, 'stage')} of at most {most}. Seconds of a step and bytes of a device, by number of "
        f"stages: {listed}. No other count beats {efficient} in both."
    ]
    notes += [f"{counted(count, 'stage')} cannot be planned: {reason}" for count, reason in sorted(refused.items())]
    fitting = [own for own in candidates if own.memory_bytes <= memory_bytes]
    return [*notes, *_slower_links(chosen, fitting), *_less_memory(chosen, candidates)]


def _slower_links(chosen: Candidate, fitting: Iterable[Candidate]) -> list[str]:
    """Returns from which links on another count is faster, all links being slower by one factor."""
    factor, other = math.inf, chosen
    for own in fitting:
        saved = chosen.waiting_s - own.waiting_s
        if own is not chosen and saved > 0:
            found = 1 + max(0.0, own.seconds - chosen.seconds) / saved
            factor, other = min((factor, other), (found, own), key=lambda one: one[0])
    if math.isinf(factor):
        return []
    return [f"With links about {factor:.3g} times slower, {counted(other.stages, 'stage')} would be as fast as {chosen.stages}."]


def _less_memory(chosen: Candidate, candidates: Iterable[Candidate]) -> list[str]:
    """Returns below which memory another count is chosen."""
    smaller = [own for own in candidates if own.memory_bytes < chosen.memory_bytes]
    if not smaller:
        return []
    other = min(smaller, key=lambda own: (own.seconds, own.stages))
    return [f"On devices with less than {bytes_text(chosen.memory_bytes)}, {counted(other.stages, 'stage')} would be chosen."]
