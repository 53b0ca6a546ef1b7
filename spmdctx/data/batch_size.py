"""Computes the size of the global batch from the batch size in a MindFormers configuration."""

from __future__ import annotations

import jax

from spmdctx.context.checks import device_count
from spmdctx.context.layers import AutoParallelContext, current_context
from spmdctx.errors import ContextError, message
from spmdctx.ir.layout import Layout


def global_batch_size(
    batch_size: int,
    *,
    data_parallel: int = 1,
    micro_batch_num: int = 1,
    micro_batch_interleave_num: int = 1,
    num_devices: int | None = None,
    context: AutoParallelContext | None = None,
) -> int:
    """Returns the rows of the global batch, as MindFormers counts them from `runner_config.batch_size`.

    | parallel_mode | batch | rows, without pipeline stages |
    |---|---|---|
    | semi_auto_parallel, auto_parallel | full_batch | batch_size * data_parallel * interleave * accumulation |
    | | a dataset_strategy of slices or Layouts | batch_size * slices of dimension 0 of the first input * interleave * accumulation |
    | | dataset_strategy "data_parallel" | batch_size * num_devices * interleave * accumulation |
    | the other modes | | batch_size * num_devices * accumulation |

    With pipeline stages, `micro_batch_num` replaces the accumulation steps in the first three rows.

    Args:
        batch_size: rows that one data-parallel part computes at once.
        data_parallel: `parallel_config.data_parallel`; slices must agree with it.
        micro_batch_num: `parallel_config.micro_batch_num`; counts only with pipeline stages.
        micro_batch_interleave_num: `micro_batch_interleave_num`.
        num_devices: all devices of the job; by default device_num if it is set, 1 in stand_alone, else those that JAX has.
        context: by default the current one.

    Raises:
        ContextError: a number is below 1, or a dataset_strategy splits the first input otherwise than `data_parallel`.
        TypeError: an argument is not an int.
    """
    context = context or current_context()
    if num_devices is None:
        num_devices = 1 if context.parallel_mode == "stand_alone" else device_count(context, len(jax.devices()))
    _check(
        batch_size=batch_size,
        data_parallel=data_parallel,
        micro_batch_num=micro_batch_num,
        micro_batch_interleave_num=micro_batch_interleave_num,
        num_devices=num_devices,
    )
    if context.parallel_mode not in ("semi_auto_parallel", "auto_parallel"):
        return batch_size * num_devices * context.grad_accumulation_step
    repeats = micro_batch_num if context.pipeline_stages > 1 else context.grad_accumulation_step
    return batch_size * _parts(context, data_parallel, num_devices) * micro_batch_interleave_num * repeats


def _parts(context: AutoParallelContext, data_parallel: int, num_devices: int) -> int:
    """Returns into how many parts the rows are split."""
    strategy = context.dataset_strategy
    if context.full_batch:
        return data_parallel
    if isinstance(strategy, str):
        return num_devices
    first = strategy[0].strategy if isinstance(strategy[0], Layout) else strategy[0]
    slices = first[0] if first else 1
    if data_parallel not in (1, slices):
        raise ContextError(
            f"data_parallel is {data_parallel}, but dataset_strategy splits the rows of the first input into {slices} slices.",
            got=f"dataset_strategy {strategy}",
            fix="make the two equal, or leave data_parallel out",
        )
    return slices


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if type(value) is not int:
            raise TypeError(message(f"{name} is a number.", got=f"{value!r} of type {type(value).__name__}", need="an int >= 1"))
        if value < 1:
            raise ContextError(f"{name} is {value}.", need="an int >= 1")
