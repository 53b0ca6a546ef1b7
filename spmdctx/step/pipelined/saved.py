"""Writes new plans of pipelines to strategy_ckpt_save_file, and uses those of strategy_ckpt_load_file instead of a search."""

from __future__ import annotations

from typing import Any

import jax

from spmdctx.errors import PlanMismatchError, naming_file
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.file import read_pipeline, write_pipeline
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.pipeline.search.plan import plan_as_decided
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.plan.plan import Plan
from spmdctx.step.planning.planner import Planned
from spmdctx.step.planning.saved import planned_as_saved
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings

_FIX = "leave strategy_ckpt_load_file out to plan again, and save the new plan with strategy_ckpt_save_file"


def loaded_pipeline(step: PipelinedStep, settings: Settings) -> PlannedPipeline | None:
    """Returns the pipeline as the plan in strategy_ckpt_load_file says, without a search; None if the context names no file.

    Raises:
        PlanFormatError: the file is no plan of a pipeline, is damaged, or has another format version.
        PlanMismatchError: the plan is for another program, machine or context.
        OSError: the file cannot be read; the message names the option.
    """
    where = settings.context.strategy_ckpt_load_file
    if not where:
        return None
    with naming_file("strategy_ckpt_load_file", where, "the plan of the pipeline cannot be read"):
        found = read_pipeline(where, PipelinePlan)
    _check(found, step, settings, where)
    programs = {f"pipeline_chunk{number}": plan for number, plan in enumerate(found.joints)}
    for stage in found.stages:
        programs |= {**stage.tasks, **stage.after}

    def planner(captured: Captured, own: Settings, **_: Any) -> Planned:
        return planned_as_saved(captured, own, _plan_of(programs, captured.name, where), where)

    return plan_as_decided(step, settings, found, planner, where)


def save_pipeline(plan: PipelinePlan, settings: Settings) -> None:
    """Writes a plan to strategy_ckpt_save_file, if the context names one; of several processes one writes it.

    Raises:
        OSError: the file cannot be written; the message names the option.
    """
    save = settings.context.strategy_ckpt_save_file
    if save and not (jax.distributed.is_initialized() and jax.process_index()):
        with naming_file("strategy_ckpt_save_file", save, "the plan cannot be written"):
            write_pipeline(plan, save)


def _plan_of(programs: dict[str, Plan], name: str, where: str) -> Plan:
    found = programs.get(name)
    if found is None:
        raise PlanMismatchError(f"The plan was made for another program: it has none named '{name}'.", where=where, fix=_FIX)
    return found


def _check(plan: PipelinePlan, step: PipelinedStep, settings: Settings, where: str) -> None:
    """Refuses a plan for another machine, or another number of stages, devices or micro-batches; programs are compared one by one.

    Raises:
        PlanMismatchError: it differs; the message names what does.
    """
    schedule = plan.simulation.schedule
    rows = (
        ("parallel_mode", plan.mode, settings.context.parallel_mode),
        ("topology", plan.topology, settings.topology.device),
        ("pipeline_stages", schedule.num_stages, settings.context.pipeline_stages),
        ("devices", plan.num_devices, settings.num_devices),
        ("micro-batches", schedule.num_micro, step.loss.num_micro),
    )
    found = [f"{name}: {theirs} in the file, {ours} here" for name, theirs, ours in rows if theirs != ours]
    if found:
        raise PlanMismatchError("The plan of the pipeline was made for something else.", where=where, got=", ".join(found), fix=_FIX)
