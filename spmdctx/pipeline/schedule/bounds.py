"""What theory says of the time in which stages wait."""

from __future__ import annotations

from spmdctx.pipeline.schedule.tasks import Costs


def bubble_of(name: str, num_stages: int, num_micro: int, costs: Costs, num_rounds: int = 1) -> float | None:
    """Returns the share of the step in which stages wait, for stages alike and moves that take no time; None if there is no formula.

    Sources: Narayanan et al. 2021 (gpipe, 1f1b, interleaved 1f1b), Qi et al. 2024 (zero_bubble_h1, if W takes at most as long as I).

    Args:
        name: of the schedule.
        num_stages: p.
        num_micro: m.
        costs: of a whole stage and one micro-batch.
        num_rounds: chunks on a stage.
    """
    filled = num_stages - 1
    if name in ("gpipe", "1f1b"):
        return filled / (num_micro + filled)
    if name in ("interleaved 1f1b", "interleaved gpipe"):
        return filled / (num_rounds * num_micro + filled)
    if name == "zero_bubble_h1":
        idle = filled * (costs.forward + costs.input - costs.weight)
        return idle / (num_micro * (costs.forward + costs.input + costs.weight) + idle)
    return None
