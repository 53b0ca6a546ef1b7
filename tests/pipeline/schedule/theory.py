"""What theory says of schedules: what is in flight, and the least time of any schedule of one chunk on each stage."""

from __future__ import annotations

from collections.abc import Sequence

from spmdctx.pipeline.schedule.tasks import Costs


def in_flight_of(name: str, num_stages: int, num_micro: int, num_rounds: int = 1) -> tuple[int, ...] | None:
    """Returns the most chunks in flight on each stage, or None if theory gives no exact number."""
    stages = range(num_stages)
    if name in ("gpipe", "interleaved gpipe"):
        return (num_micro * num_rounds,) * num_stages
    if name == "1f1b":
        return tuple(min(num_stages - stage, num_micro) for stage in stages)
    if name == "interleaved 1f1b":
        total = num_micro * num_rounds
        return tuple(min(2 * (num_stages - stage - 1) + (num_rounds - 1) * num_stages + 1, total) for stage in stages)
    if name == "zero_bubble_h1":
        return (min(num_stages, num_micro),) * num_stages
    return None


def least_makespan_s(costs: Sequence[Costs], num_micro: int, *, splits_backward: bool) -> float:
    """Returns seconds below which no schedule of one chunk on each stage can end, whatever its order.

    A stage starts after the first micro-batch has passed those before it, computes all its tasks, and the last input gradient
    passes back through them.
    """
    least = before = forward = 0.0
    for own in costs:
        back = own.input if splits_backward else own.backward
        least = max(least, before + num_micro * (own.forward + back))
        if splits_backward:
            # The gradients of weights may come last: nothing passes back after them.
            least = max(least, forward + num_micro * (own.forward + own.input + own.weight))
        before += own.forward + back
        forward += own.forward
    return least
