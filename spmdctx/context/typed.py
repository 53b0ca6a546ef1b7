"""The options as type checkers and editors know them: the table of `options.py` with a type for each name, checked by a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from spmdctx.ir.layout import Layout

ParallelMode = Literal["stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel"]
SearchMode = Literal["recursive_programming", "dynamic_programming", "sharding_propagation"]


class StrategyFilesDict(TypedDict, total=False):
    """strategy_ckpt_config."""

    load_file: str
    save_file: str
    only_trainable_params: bool


class ParallelOptimizerDict(TypedDict, total=False):
    """parallel_optimizer_config; the threshold is in KB."""

    gradient_accumulation_shard: bool
    parallel_optimizer_threshold: int
    optimizer_weight_shard_size: int
    optimizer_level: Literal["level1", "level2", "level3"]


class FusionDict(TypedDict, total=False):
    """One kind of collective in comm_fusion: MB in size mode, indices of gradients in index mode."""

    mode: Literal["auto", "size", "index"]
    config: int | Sequence[int] | None


class CommFusionDict(TypedDict, total=False):
    """comm_fusion."""

    openstate: bool
    allreduce: FusionDict
    allgather: FusionDict
    reducescatter: FusionDict


class PipelineDict(TypedDict, total=False):
    """pipeline_config."""

    pipeline_interleave: bool
    pipeline_scheduler: Literal["gpipe", "1f1b", "zero_bubble_v", "zero_bubble_h1"]


class ContextOptions(TypedDict, total=False):
    """The options of `set_auto_parallel_context`, `auto_parallel_context` and `parallel`; docs/options.md says what they do."""

    device_num: int
    global_rank: int
    gradients_mean: bool
    gradient_fp32_sync: bool
    loss_repeated_mean: bool
    parallel_mode: ParallelMode
    search_mode: SearchMode
    auto_parallel_search_mode: SearchMode
    sharding_propagation: bool
    parameter_broadcast: bool
    strategy_ckpt_load_file: str
    strategy_ckpt_save_file: str
    strategy_ckpt_config: StrategyFilesDict
    group_ckpt_save_file: Literal[""]
    full_batch: bool
    dataset_strategy: Literal["data_parallel", "full_batch"] | tuple[tuple[int, ...] | Layout, ...]
    enable_parallel_optimizer: bool
    parallel_optimizer_config: ParallelOptimizerDict
    optimizer_weight_shard_size: int
    optimizer_weight_shard_aggregated_save: Literal[False]
    enable_alltoall: bool
    all_reduce_fusion_config: Sequence[int]
    comm_fusion: CommFusionDict
    pipeline_stages: int
    pipeline_config: PipelineDict
    pipeline_segments: int
    auto_pipeline: bool
    grad_accumulation_step: int
    communi_parallel_mode: Literal["all_group_parallel"]
    mem_coeff: float


class AlgoOptions(TypedDict, total=False):
    """The parameters of `set_algo_parameters`."""

    fully_use_devices: bool
    elementwise_op_strategy_follow: bool
    tensor_slice_align_enable: bool
    tensor_slice_align_size: int
    enable_algo_approxi: bool
    algo_approxi_epsilon: float
