"""Writes new plans to strategy_ckpt_save_file, and uses those of strategy_ckpt_load_file instead of a search."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax

from spmdctx.context.options import PLANNED_MODES
from spmdctx.errors import PlanMismatchError, naming_file
from spmdctx.ir.mesh import format_sharding
from spmdctx.ir.sharding import TensorSharding
from spmdctx.plan.data import Cost, PeakForm, PeakNote, PlannedTensor, Timing
from spmdctx.plan.file import read_strategy, write_plan
from spmdctx.plan.mindspore.file import MindSporeStrategy
from spmdctx.plan.mindspore.pins import FilePins, Parameter, file_pins
from spmdctx.plan.mismatch import Wanted, check_plan
from spmdctx.plan.plan import Plan
from spmdctx.step.planning.insight import with_insight
from spmdctx.step.planning.notes import memory_notes, without_peak_notes
from spmdctx.step.planning.planner import Planned, plan_program, priced_here
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording import exact_bytes_text, seconds_text

REASON = "the strategy file"


def planned_with_files(captured: Captured, settings: Settings) -> Planned:
    """Plans a captured step with the strategy files of the context; the plan can explain itself (`with_insight`).

    A plan in strategy_ckpt_load_file is used as it is, without a search; the layouts of a MindSpore strategy file are pins.

    Raises:
        PlanFormatError: the file is no plan and no strategy file, is damaged, or has another format version.
        PlanMismatchError: the file is for another program, mesh, machine or context.
        OSError: a file is missing, or cannot be written; the message names the option.
    """
    context = settings.context
    if context.parallel_mode not in PLANNED_MODES:
        return with_insight(plan_program(captured, settings), captured, settings)
    load, save = context.strategy_ckpt_load_file, context.strategy_ckpt_save_file
    made = _loaded(captured, settings, load) if load else with_insight(plan_program(captured, settings), captured, settings)
    # Every process makes the same plan; one of them writes it.
    if save and not (jax.distributed.is_initialized() and jax.process_index()):
        with naming_file("strategy_ckpt_save_file", save, "the plan cannot be written"):
            write_plan(made.plan, save)
    return made


def loaded_plan(settings: Settings) -> Plan | None:
    """Returns the plan in strategy_ckpt_load_file, or None if there is none; checks everything that needs no step."""
    context = settings.context
    load = context.strategy_ckpt_load_file
    if not load or context.parallel_mode not in PLANNED_MODES or context.pipeline_stages > 1:
        return None
    with naming_file("strategy_ckpt_load_file", load, "the strategy file cannot be read"):
        found = read_strategy(load, Plan)
    if not isinstance(found, Plan):
        return None
    check_plan(found, replace(_wanted(settings), memory_bytes=None), None, load)
    return found


def _loaded(captured: Captured, settings: Settings, load: str) -> Planned:
    with naming_file("strategy_ckpt_load_file", load, "the strategy file cannot be read"):
        found = read_strategy(load, Plan)
    if isinstance(found, MindSporeStrategy):
        return _pinned(captured, settings, found, Path(load).name)
    return with_insight(planned_as_saved(captured, settings, found, load), captured, settings)


def planned_as_saved(captured: Captured, settings: Settings, found: Plan, where: str) -> Planned:
    """Plans a captured step as a plan of the file `where` says.

    Raises:
        PlanMismatchError: the plan is for another program, mesh, machine or context.
    """
    start = time.perf_counter()
    program = captured.built_for(settings.topology.compiler)
    wanted = _wanted(settings)
    check_plan(found, replace(wanted, memory_bytes=None), program.graph, where)
    here = priced_here(found, program, captured, settings)
    used = _with_price(found, here.plan, settings)
    check_plan(used, wanted, program.graph, where)
    timing = Timing(trace_s=captured.trace_s, search_s=time.perf_counter() - start)
    return replace(here, plan=replace(used, timing=timing, about=here.plan.about))


def _with_price(plan: Plan, here: Plan, settings: Settings) -> Plan:
    """Returns the plan with its price `here`, which depends on donated arguments and on the machine's figures.

    A lower bound that was proved for another machine is dropped.
    """
    if plan.cost == here.cost:
        return replace(plan, memory_profile=here.memory_profile, early=here.early)
    notes, peak_bytes = list(plan.notes), here.cost.memory_bytes
    if plan.cost.memory_bytes != peak_bytes:
        notes = without_peak_notes(notes) + memory_notes(settings, peak_bytes, here.safe_memory_bytes)
        known = exact_bytes_text(plan.cost.memory_bytes)
        why = "other arguments are donated here, or the topology has other figures"
        notes.append(PeakNote(PeakForm.OTHER_THAN_SAVED, peak=exact_bytes_text(peak_bytes), saved=known, why=why))
    if _seconds(plan.cost) == _seconds(here.cost):
        return replace(plan, cost=here.cost, memory_profile=here.memory_profile, early=here.early, notes=tuple(notes))
    times = [seconds_text(cost.total_s) for cost in (here.cost, plan.cost)]
    notes.append(f"The predicted time of a step is {times[0]}, and not {times[1]} as in the strategy file: the topology has other figures.")
    return replace(here, lower_bound_s=None, gap=None, notes=tuple(notes))


def _seconds(cost: Cost) -> Cost:
    return cost._replace(memory_bytes=0)


def _wanted(settings: Settings) -> Wanted:
    context = settings.context
    return Wanted(
        num_devices=settings.num_devices,
        mesh=settings.mesh,
        topology=settings.topology.device,
        mode=context.parallel_mode,
        options=context.plan_options(),
        memory_bytes=settings.memory_bytes,
    )


def _pinned(captured: Captured, settings: Settings, strategy: MindSporeStrategy, name: str) -> Planned:
    """Plans with the parameters of a MindSpore strategy file pinned."""
    parameters = [Parameter(leaf.path, leaf.role, leaf.shape) for leaf in captured.inputs]
    pins = file_pins(strategy, parameters, settings.num_devices, settings.mesh, name)
    marked = [leaf.path for leaf in captured.inputs if leaf.path in pins.shardings and leaf.metadata is not None]
    if marked:
        raise PlanMismatchError(
            "The strategy file and partitioning metadata both say how a parameter is split.", where=name, got=", ".join(marked[:4])
        )
    inputs = tuple(replace(leaf, metadata=pins.shardings.get(leaf.path, leaf.metadata)) for leaf in captured.inputs)
    pinned = replace(captured, inputs=inputs, notes=(*captured.notes, *pins.notes, _summary(pins, name)))
    placed = replace(settings, mesh=pins.mesh)
    made = plan_program(pinned, placed)
    own = tuple(_with_reason(tensor, pins.shardings) for tensor in made.plan.inputs)
    return with_insight(replace(made, plan=replace(made.plan, inputs=own)), pinned, placed)


def _summary(pins: FilePins, name: str) -> str:
    return f"Strategy file {name}: {len(pins.shardings)} parameters are split as it says."


def _with_reason(tensor: PlannedTensor, shardings: Mapping[str, TensorSharding]) -> PlannedTensor:
    wanted = shardings.get(tensor.path)
    if wanted is None:
        return tensor
    reason = REASON if wanted == tensor.sharding else f"{REASON} asks for {format_sharding(wanted)}"
    return tensor._replace(reason=reason)
