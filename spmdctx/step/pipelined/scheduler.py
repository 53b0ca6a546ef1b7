"""The schedule that the context asks for."""

from __future__ import annotations

from spmdctx.context.state import AutoParallelContext
from spmdctx.pipeline.schedule.named import Scheduler


def scheduler_of(context: AutoParallelContext) -> Scheduler:
    """Returns the schedule of pipeline_config, with pipeline_segments chunks on each stage if they are interleaved."""
    config = context.pipeline_config
    return Scheduler(config.pipeline_scheduler, context.pipeline_segments if config.pipeline_interleave else 1)


def sets_schedule(context: AutoParallelContext) -> bool:
    """Returns whether the user set any part of the schedule, which is kept then."""
    return context.is_set("pipeline_config") or context.is_set("pipeline_segments")
