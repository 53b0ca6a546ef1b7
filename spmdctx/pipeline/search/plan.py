"""Plans a pipelined step whose number of stages and schedule are decided."""

from __future__ import annotations

from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.search.balance import balanced
from spmdctx.pipeline.stages.alike import AlikePlanner
from spmdctx.pipeline.stages.plans import Planner
from spmdctx.pipeline.stages.staging import ScheduleOf, Staging, cut_loss
from spmdctx.pipeline.stages.whole import PlannedPipeline, completed
from spmdctx.trace.scope.settings import Settings


def plan_pipeline(step: PipelinedStep, settings: Settings, num_chunks: int, schedule_of: ScheduleOf, planner: Planner) -> PlannedPipeline:
    """Plans a step on a pipeline.

    Args:
        step: the captured step.
        settings: of the whole step; its devices are divided over the stages.
        num_chunks: into how many parts the loss is cut.
        schedule_of: makes the schedule from the costs of the chunks: first the estimated ones, then the planned ones.
        planner: plans a captured program on the devices of one stage.

    Raises:
        UnsupportedError: the loss has too few equations, or what follows it mixes arrays of several stages.
    """
    staging = Staging(cut_loss(step, settings), settings, num_chunks, schedule_of, AlikePlanner(planner))
    return completed(staging, balanced(staging))
