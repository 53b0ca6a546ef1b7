"""Chooses among planned numbers of stages and schedules, and says what would change the choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmdctx.wording import bytes_text, counted, seconds_text


class Candidate(NamedTuple):
    """A step on some number of stages.

    Attributes:
        stages: their number; 1 is the step without a pipeline, which accumulates gradients.
        seconds: of a step.
        waiting_s: the part of them in which links are waited for.
        memory_bytes: the planned peak of the fullest device.
        schedule: the name of the schedule; empty for 1 stage.
    """

    stages: int
    seconds: float
    waiting_s: float
    memory_bytes: int
    schedule: str = ""

    @property
    def name(self) -> str:
        """What messages call it."""
        return counted(self.stages, "stage") + (f" by {self.schedule}" if self.schedule else "")


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


class Choices(NamedTuple):
    """What was planned, and by the names of all others why they cannot be, or need not be."""

    candidates: list[Candidate]
    refused: dict[str, str]
    skipped: dict[str, str]

    def best_s(self, memory_bytes: int) -> float:
        """Returns the seconds of the fastest one that fits into the memory of a device."""
        return min((own.seconds for own in self.candidates if own.memory_bytes <= memory_bytes), default=math.inf)


def choice_notes(chosen: Candidate, choices: Choices, most: int, memory_bytes: int) -> list[str]:
    """Returns what a user would want to know of the choice: all that was planned, what was not and why, and what would flip it.

    Args:
        chosen: one of the candidates.
        choices: it and all others.
        most: the number of stages that the user allows.
        memory_bytes: of a device.
    """
    candidates, by = choices.candidates, f", by {chosen.schedule}" if chosen.schedule else ""
    efficient = ", ".join(own.name for own in pareto(candidates))
    notes = [
        f"auto_pipeline chose {counted(chosen.stages, 'stage')} of at most {most}{by}. Seconds of a step and bytes of a device: "
        f"{_listed(candidates)}. Efficient in both: {efficient}."
    ]
    notes += [f"{name} cannot be planned: {reason}" for name, reason in choices.refused.items()]
    if choices.skipped:
        names: dict[tuple[str, str], list[str]] = {}
        for name, reason in choices.skipped.items():
            stages, _, schedule = name.partition(" by ")
            names.setdefault((stages, reason), []).append(schedule)
        notes.append(
            "Not planned: " + "; ".join(f"{stages} by {', '.join(own)}, since {why}" for (stages, why), own in names.items()) + "."
        )
    fitting = [own for own in candidates if own.memory_bytes <= memory_bytes]
    return [*notes, *_slower_links(chosen, fitting), *_less_memory(chosen, candidates)]


def _listed(candidates: Iterable[Candidate]) -> str:
    """Returns the seconds and bytes of all, those of one number of stages together."""
    by_count: dict[int, list[str]] = {}
    for own in candidates:
        figures = f"{seconds_text(own.seconds)}, {bytes_text(own.memory_bytes)}"
        by_count.setdefault(own.stages, []).append(f"{own.schedule} {figures}".lstrip())
    return "; ".join(f"{counted(count, 'stage')}: {' / '.join(by_count[count])}" for count in sorted(by_count))


def _slower_links(chosen: Candidate, fitting: Iterable[Candidate]) -> list[str]:
    """Returns from which links on another one is faster, all links being slower by one factor."""
    factor, other = math.inf, chosen
    for own in fitting:
        saved = chosen.waiting_s - own.waiting_s
        if own is not chosen and saved > 0:
            found = 1 + max(0.0, own.seconds - chosen.seconds) / saved
            factor, other = min((factor, other), (found, own), key=lambda one: one[0])
    if math.isinf(factor):
        return []
    return [f"With links about {factor:.3g} times slower, {other.name} would be as fast as {chosen.name}."]


def _less_memory(chosen: Candidate, candidates: Iterable[Candidate]) -> list[str]:
    """Returns below which memory another one is chosen."""
    smaller = [own for own in candidates if own.memory_bytes < chosen.memory_bytes]
    if not smaller:
        return []
    other = min(smaller, key=lambda own: (own.seconds, own.stages))
    return [f"On devices with less than {bytes_text(chosen.memory_bytes)}, {other.name} would be chosen."]
