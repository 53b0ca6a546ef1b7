"""Decides whether gradients wait for the last micro-batch to be reduced, and tells what that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from spmdctx.context.state import AutoParallelContext
from spmdctx.errors import InfeasibleError
from spmdctx.pipeline.stages.memory import memory_of
from spmdctx.pipeline.stages.sizes import device_bytes
from spmdctx.pipeline.stages.staging import Stages, Staging
from spmdctx.pipeline.stages.whole import PlannedPipeline, completed, surrounded
from spmdctx.wording import bytes_text, counted, seconds_text

IN_TURNS = "Gradients are reduced in every micro-batch, not once per step: sums that wait do not fit in the memory."

IN_LESS_TIME = (
    "Gradients are reduced in every micro-batch, not once per step: sums that wait fit in the memory only with splits that take longer."
)

BY_INDEX = (
    "Gradients are reduced in every micro-batch, not once per step: buckets by index ask for it. Without all_reduce_fusion_config they are "
    "reduced once."
)


class Chosen(NamedTuple):
    """A planned pipeline with the stages that it is made of."""

    staging: Staging
    stages: Stages
    found: PlannedPipeline


_NEAR = 1.1
"""Sums that wait are made to fit if a step then takes at most so many times as long; else plans without them are tried, too."""


def reduced_once(
    once: Chosen, plan: Callable[[bool, Chosen | None], Chosen], fit: Callable[[Chosen], Chosen], room: int, *, is_binding: bool
) -> Chosen:
    """Returns the plan whose gradients wait where that is worthwhile, planned again within the memory of a device if it is larger.

    If nothing fits, gradients are reduced in every micro-batch.

    Args:
        once: the plan with gradients that may wait.
        plan: plans with gradients that may wait, or without; given another plan, roughly, with its cuts and mesh.
        fit: plans again within the memory of a device.
        room: bytes of a device.
        is_binding: whether a plan that does not fit is of no use.

    Raises:
        InfeasibleError: nothing fits, and must.
    """
    peak, waits = _peak(once.found), bool(once.found.reductions)
    fitted, error = _fitted(once, fit, room)
    if error is None and (not waits or fitted.found.total_s <= _NEAR * once.found.total_s):
        return fitted
    if not waits or not (is_binding or _may_fit(once.found, room)) or (not is_binding and _peak(plan(False, once).found) >= peak):
        return _or_raised(fitted, error, is_binding=is_binding)
    in_turns = plan(False, None)
    if _peak(in_turns.found) >= peak:
        return _or_raised(fitted, error, is_binding=is_binding)
    found, later = _fitted(in_turns, fit, room)
    if error is None and (later is not None or fitted.found.total_s <= found.found.total_s):
        return fitted
    found.found.notes.append(IN_TURNS if error is not None else IN_LESS_TIME)
    return _or_raised(found, later, is_binding=is_binding)


def _fitted(own: Chosen, fit: Callable[[Chosen], Chosen], room: int) -> tuple[Chosen, InfeasibleError | None]:
    """Returns a plan that fits, or the given one and why there is none."""
    if _peak(own.found) <= room:
        return own, None
    try:
        return fit(own), None
    except InfeasibleError as error:
        return own, error


def _or_raised(own: Chosen, error: InfeasibleError | None, *, is_binding: bool) -> Chosen:
    if error is not None and is_binding:
        raise error
    return own


def best_completed(staging: Staging, stages: Stages, room: int) -> PlannedPipeline:
    """Plans what follows the loss, with the sums that wait reduced as is faster within `room` bytes: to all devices, or to a part each.

    Only where splits are searched, or the parallel optimizer splits what reads gradients, are both tried.
    """
    own = surrounded(stages)
    found = completed(staging, own)
    context = staging.settings.context
    if not found.reductions or not (context.parallel_mode == "auto_parallel" or context.enable_parallel_optimizer):
        return found
    return min(found, completed(staging, own, scatters=True), key=lambda one: _rank(one, room))


def _rank(found: PlannedPipeline, room: int) -> tuple[int, float]:
    return max(0, _peak(found) - room), found.total_s


def _peak(found: PlannedPipeline) -> int:
    return max(own.peak_bytes for own in memory_of(found))


def _may_fit(found: PlannedPipeline, room: int) -> bool:
    """Returns whether stages could fit if the sums that wait took no memory."""
    return all(own.peak_bytes - less <= room for own, less in zip(memory_of(found), held_bytes(found), strict=True))


def held_bytes(pipeline: PlannedPipeline) -> list[int]:
    """Returns the bytes on a device of each stage of the sums that wait."""
    found = [0] * pipeline.schedule.num_stages
    for number, chunk in enumerate(pipeline.planned):
        sizes = (device_bytes(own.aval, own.dims, chunk.mesh) for own in chunk.held.values())
        found[pipeline.stage_of_chunk(number)] += sum(sizes)
    return found


def reduction_notes(pipeline: PlannedPipeline, context: AutoParallelContext) -> list[str]:
    """Returns a note on gradients that wait for the last micro-batch to be reduced, or on buckets for which they do not."""
    count = sum(len(chunk.held) for chunk in pipeline.planned)
    if not count:
        return [BY_INDEX] if context.fuses_by_index else []
    return [
        f"{counted(count, 'gradient')} are reduced once per step, in {seconds_text(pipeline.reduced_s)} after the last micro-batch. Until "
        f"then each device adds up its own, in sums of up to {bytes_text(max(held_bytes(pipeline)))}."
    ]
