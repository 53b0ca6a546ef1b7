"""Checks when a step is planned or called: options that contradict each other or the devices, or that have no effect."""

from __future__ import annotations

import math

from spmdctx.context.options import ALGO_OPTIONS, OPTIONS
from spmdctx.context.state import AutoParallelContext
from spmdctx.context.storage import Option
from spmdctx.context.values import plain
from spmdctx.errors import ContextError, StrategyError
from spmdctx.ir.layout import Layout
from spmdctx.wording import counted
from spmdctx.wording.user_warnings import warn_user

_RECURSIVE = "recursive_programming"
_OF_PARALLEL_OPTIMIZER = ("parallel_optimizer_config", "optimizer_weight_shard_size")
_OF_PIPELINE = ("pipeline_config", "pipeline_segments")
_FULL_BATCH_REFUSED = ("data_parallel", "hybrid_parallel")


def device_count(context: AutoParallelContext, available: int) -> int:
    """Returns how many devices a step spans: device_num if the user set it, else all available ones."""
    return context.device_num if context.is_set("device_num") else available


def check_consistency(context: AutoParallelContext, num_devices: int, *, running: bool = False, mesh_devices: int | None = None) -> None:
    """Raises on options that contradict each other or the devices.

    Args:
        context: The context of the step.
        num_devices: Devices that are there.
        running: Whether the step is about to run; planning works for more devices than there are.
        mesh_devices: Size of the mesh the user gave, if any.

    Raises:
        ContextError: the contradiction, with both values.
        StrategyError: a dataset_strategy that the devices cannot hold.
    """
    _check_counts(context, num_devices, running, mesh_devices)
    if context.parallel_mode == "stand_alone":
        return
    total = device_count(context, num_devices) if mesh_devices is None else mesh_devices
    _check_stages(context, total)
    _check_batch(context, total)


def _check_counts(context: AutoParallelContext, num_devices: int, running: bool, mesh_devices: int | None) -> None:
    total = device_count(context, num_devices)
    if mesh_devices is not None and context.is_set("device_num") and context.device_num != mesh_devices:
        raise ContextError(
            f"device_num is {context.device_num}, but the mesh has {counted(mesh_devices, 'device')}.",
            fix="leave one of the two out, or make them equal",
        )
    if running and total > num_devices:
        raise ContextError(
            f"device_num is {total}, but there {_are(num_devices)}.",
            need=f"device_num {f'in [1, {num_devices}]' if num_devices > 1 else '1'} to run; planning works for any",
            fix=f"use step.plan, or have {total} CPU devices: jax.config.update('jax_num_cpu_devices', {total}) before JAX is used, "
            f"or XLA_FLAGS=--xla_force_host_platform_device_count={total}",
        )
    if context.is_set("global_rank") and context.global_rank >= total:
        raise ContextError(f"global_rank is {context.global_rank}, but there {_are(total)}.", need=f"global_rank in [0, {total - 1}]")


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {counted(count, 'device')}"


def _check_stages(context: AutoParallelContext, total: int) -> None:
    stages = context.pipeline_stages
    if total % stages:
        fitting = [count for count in range(1, total + 1) if total % count == 0]
        raise ContextError(
            f"pipeline_stages is {stages}, which does not divide {counted(total, 'device')}.",
            need="pipeline_stages among " + ", ".join(map(str, fitting)),
        )
    config = context.pipeline_config
    if stages > 1 and config.pipeline_interleave and config.pipeline_scheduler == "zero_bubble_h1":
        raise ContextError(
            "pipeline_interleave and the scheduler zero_bubble_h1, which has one chunk on each stage, contradict each other.",
            got=f"pipeline_config={plain(config)}",
            fix="set pipeline_interleave=False, or pipeline_scheduler='zero_bubble_v'",
        )
    size = context.optimizer_weight_shard_size
    if context.enable_parallel_optimizer and size > total // stages:
        raise ContextError(
            f"optimizer_weight_shard_size is {size}, but a stage has {counted(total // stages, 'device')}.",
            need=f"1 to {total // stages}, or -1",
        )


def _check_batch(context: AutoParallelContext, total: int) -> None:
    mode, strategy = context.parallel_mode, context.dataset_strategy
    if context.full_batch and mode in _FULL_BATCH_REFUSED:
        raise ContextError(
            f"full_batch cannot be used in {mode}, where each device gets its part of the batch.",
            need="parallel_mode 'semi_auto_parallel' or 'auto_parallel'",
            fix="set dataset_strategy='data_parallel'",
        )
    if isinstance(strategy, str) or mode in _FULL_BATCH_REFUSED:
        return
    entries = [entry.strategy if isinstance(entry, Layout) else entry for entry in strategy]
    if context.full_batch and any(slices > 1 for entry in entries for slices in entry):
        raise ContextError(
            "full_batch and a dataset_strategy that splits the batch contradict each other.",
            got=f"full_batch=True, dataset_strategy={strategy}",
            fix="set full_batch=False, or dataset_strategy='full_batch'",
        )
    per_stage = total // context.pipeline_stages
    of_stages = f" of each of {context.pipeline_stages} pipeline stages" if context.pipeline_stages > 1 else ""
    for position, entry in enumerate(strategy):
        blocks = math.prod(entry.device_matrix if isinstance(entry, Layout) else entry)
        if per_stage % blocks:
            raise StrategyError(
                f"dataset_strategy[{position}] has {blocks} slices, which does not divide {counted(per_stage, 'device')}{of_stages}.",
                got=f"dataset_strategy[{position}] = {entry}{f', {total} devices in all' if of_stages else ''}",
                need=f"slices whose product divides {per_stage}",
            )


def ineffective(context: AutoParallelContext) -> tuple[tuple[str, str], ...]:
    """Returns the options set by the user that have no effect, as (name, sentence) in table order.

    Values that request nothing, such as a switch that is off, are left out.
    """
    rows = [(option, context.value(option), context.is_set(option.name)) for option in OPTIONS]
    rows += [(option, getattr(context.algo, option.name), option.name in context.algo.explicit) for option in ALGO_OPTIONS]
    found = []
    for option, value, is_set in rows:
        reason = _reason(option, context) if is_set and value != option.asks_nothing else ""
        if reason:
            found.append((option.name, f"{option.name}={plain(value)!r} has no effect: {reason}."))
    return tuple(found)


def _reason(option: Option, context: AutoParallelContext) -> str:
    if context.parallel_mode not in option.modes:
        return f"parallel_mode {context.parallel_mode!r} does not use it (it acts in {', '.join(option.modes)})"
    if option.name == "mem_coeff" and context.effective_search_mode != _RECURSIVE:
        return f"search_mode {context.effective_search_mode!r} does not use it (it acts in {_RECURSIVE})"
    if option.name in _OF_PARALLEL_OPTIMIZER and not context.enable_parallel_optimizer:
        return "enable_parallel_optimizer is off"
    if option.name in _OF_PIPELINE and context.pipeline_stages == 1:
        return "pipeline_stages is 1"
    if option.name == "pipeline_segments" and context.pipeline_config.pipeline_scheduler == "zero_bubble_v":
        return "zero_bubble_v has two chunks on each stage"
    if option.name == "pipeline_segments" and not context.pipeline_config.pipeline_interleave:
        return "pipeline_interleave is off"
    return "" if option.built else "it is not built yet"


def warn_ineffective(context: AutoParallelContext) -> tuple[str, ...]:
    """Gives a ContextWarning for each option without effect, and returns their sentences for the plan's notes."""
    sentences = tuple(sentence for _, sentence in ineffective(context))
    for sentence in sentences:
        warn_user(sentence)
    return sentences
