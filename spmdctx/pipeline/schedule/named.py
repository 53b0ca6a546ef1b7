"""Schedules by the names that the context gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmdctx.pipeline.schedule.orders import gpipe, interleaved, interleaved_gpipe, one_f_one_b
from spmdctx.pipeline.schedule.tasks import Costs, Schedule, cost_of
from spmdctx.pipeline.schedule.zero_bubble import zero_bubble_h1, zero_bubble_v


class Scheduler(NamedTuple):
    """A kind of schedule.

    Attributes:
        name: as pipeline_scheduler of the context has it.
        rounds: chunks on each stage, where that is a choice.
    """

    name: str
    rounds: int = 1

    def num_chunks(self, num_stages: int) -> int:
        """Returns into how many chunks the loss is cut."""
        return num_stages * (2 if self.name == "zero_bubble_v" else self.rounds)

    def schedule(self, num_stages: int, num_micro: int, costs: Sequence[Costs]) -> Schedule:
        """Makes the schedule; `costs`, one for each chunk, decide the order of zero_bubble_v alone.

        Raises:
            ContextError: chunks are interleaved, and micro-batches do not fill rounds of stages.
        """
        if self.name == "zero_bubble_v":
            return zero_bubble_v(num_stages, num_micro, cost_of(costs))
        if self.name == "zero_bubble_h1":
            return zero_bubble_h1(num_stages, num_micro)
        if self.rounds > 1:
            return (interleaved_gpipe if self.name == "gpipe" else interleaved)(num_stages, num_micro, self.rounds)
        return (gpipe if self.name == "gpipe" else one_f_one_b)(num_stages, num_micro)
