"""Plans a step on a pipeline again, for another budget or number of devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spmdctx.context.values import memory_budget
from spmdctx.errors import StrategyError
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.search.plan import PipelinePlanner
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.step.pipelined.scheduler import scheduler_of
from spmdctx.step.planning.planner import plan_program
from spmdctx.trace.scope.environment import Environment
from spmdctx.wording import counted

Finish = Callable[[Environment, PlannedPipeline], Any]
"""Makes the plan that users see."""


@dataclass(frozen=True)
class PipelineReplanner:
    """Plans a captured step again on as many stages and by the same schedule; budgets share what none of them changes.

    Args:
        step: the captured step.
        environment: what surrounds it.
        finish: makes the plan that users see.
    """

    step: PipelinedStep
    environment: Environment
    finish: Finish
    planners: dict[int, PipelinePlanner] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, *, memory_bytes: int | None = None, num_devices: int | None = None) -> Any:
        """Plans for a budget per device (None for no budget) and a number of devices of all stages (None for as many as before).

        Raises:
            ContextError: the budget is not positive.
            InfeasibleError: no plan fits.
            StrategyError: the stages do not divide so many devices, or the user's strategies do not fit them.
        """
        around = with_budget(self.environment, memory_bytes, num_devices)
        settings = around.settings
        stages, scheduler = settings.context.pipeline_stages, scheduler_of(settings.context)
        if settings.num_devices % stages:
            text = f"{counted(settings.num_devices, 'device')} cannot be divided into {counted(stages, 'stage')}."
            raise StrategyError(text, fix="ask for multiples of pipeline_stages")
        planner = self.planners.setdefault(settings.num_devices, PipelinePlanner(self.step, settings, plan_program))
        found = planner.plan(settings, scheduler.num_chunks(stages), lambda costs, count: scheduler.schedule(stages, count, costs))
        return self.finish(around, found)


def with_budget(around: Environment, memory_bytes: int | None, num_devices: int | None) -> Environment:
    """Returns what surrounds a step with another budget and number of devices, None for none and for as many as before.

    Raises:
        ContextError: the budget is not positive.
    """
    old = around.settings
    count = old.num_devices if num_devices is None else num_devices
    mesh = old.mesh if count == old.num_devices else None
    context = old.context.replace(device_num=count) if old.context.is_set("device_num") else old.context
    return replace(around, settings=replace(old, context=context, num_devices=count, mesh=mesh, memory_bytes=memory_budget(memory_bytes)))
