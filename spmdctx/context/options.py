"""The option table: name, kind, default, allowed values, modes and meaning of every context option.

It drives the checks, `get`, the documentation, the command line and the warnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spmdctx.context import storage, values
from spmdctx.context.storage import Option
from spmdctx.context.values import CommFusion, FusionEntry, ParallelOptimizerConfig, PipelineConfig, StrategyFiles
from spmdctx.errors import ContextError, message, shown

PARALLEL_MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")
SEARCH_MODES = ("recursive_programming", "dynamic_programming", "sharding_propagation")

_DISTRIBUTED = PARALLEL_MODES[1:]
_LOCAL_LOSS = ("data_parallel", "hybrid_parallel")
PLANNED_MODES = ("semi_auto_parallel", "auto_parallel")
_REPLICAS = ("data_parallel", *PLANNED_MODES)
_AUTO = ("auto_parallel",)

LATER_OPTIONS = (
    "pipeline_result_broadcast",
    "force_fp32_communication",
    "dump_local_norm",
    "dump_local_norm_path",
    "dump_device_local_norm",
)
"""Options of MindSpore versions after 2.0, listed so that the error can say so."""

_AUTO_FUSION = FusionEntry("auto", None)

OPTIONS: tuple[Option, ...] = (
    Option(
        "device_num",
        "int",
        values.integer(1, 4096),
        1,
        "1 to 4096",
        PARALLEL_MODES,
        "Number of devices a step uses: the first n. Unset: all there are (`get` gives 1). Larger than what is there: planning works, "
        "running is an error.",
    ),
    Option(
        "global_rank",
        "int",
        values.integer(0, 4095),
        0,
        "0 to 4095, below device_num",
        PARALLEL_MODES,
        "Checked against the device count. JAX itself knows which devices a process holds, so it decides nothing.",
        in_plan=False,
    ),
    Option(
        "gradients_mean",
        "bool",
        values.boolean,
        False,
        "",
        _LOCAL_LOSS,
        "`spmdctx.value_and_grad` averages gradients over the replicas instead of summing them. No effect on plain `jax.grad`, which means "
        "the global loss.",
    ),
    Option(
        "gradient_fp32_sync",
        "bool",
        values.boolean,
        True,
        "",
        _DISTRIBUTED,
        "Low-precision gradients are reduced across devices in float32 and cast back; False: in their own type.",
        quiet=False,
    ),
    Option(
        "loss_repeated_mean",
        "bool",
        values.boolean,
        True,
        "",
        _LOCAL_LOSS,
        "Where every device computes the same loss, since nothing of the batch enters it, its gradient is divided among them instead of "
        "summed.",
    ),
    Option(
        "parallel_mode",
        "str",
        values.choice(PARALLEL_MODES),
        "stand_alone",
        "one of " + ", ".join(PARALLEL_MODES),
        PARALLEL_MODES,
        "One device; the batch split; the user's own collectives; `shard()` strategies, batch parallel elsewhere; planned automatically.",
    ),
    Option(
        "search_mode",
        "str",
        values.choice(SEARCH_MODES),
        "dynamic_programming",
        "one of " + ", ".join(SEARCH_MODES),
        _AUTO,
        "How auto_parallel fills in the shardings: fast by element counts and a polish, exact, or spread from what is pinned.",
    ),
    Option(
        "auto_parallel_search_mode",
        "str",
        values.choice(SEARCH_MODES),
        "dynamic_programming",
        "as search_mode",
        _AUTO,
        "The older name of search_mode; setting either changes both.",
        store=storage.store_search_mode,
        same_as="search_mode",
    ),
    Option(
        "sharding_propagation",
        "bool",
        values.boolean,
        False,
        "",
        _AUTO,
        "The older switch for propagation: True selects it whatever search_mode says.",
    ),
    Option(
        "parameter_broadcast",
        "bool",
        values.boolean,
        False,
        "",
        _DISTRIBUTED,
        "Before the first step all devices get device 0's parameters and other state; split and layerwise_parallel ones excepted.",
    ),
    Option(
        "strategy_ckpt_load_file",
        "str",
        values.text,
        "",
        "a path, or '' for none",
        PLANNED_MODES,
        "A saved plan, which is used instead of a search and refused where it is for another program, mesh, machine or context; or a "
        "strategy file of MindSpore in JSON, whose layouts are pins of the step's parameters. What the file holds decides.",
        store=storage.store_entry("strategy_ckpt_config", "load_file"),
        in_plan=False,
    ),
    Option(
        "strategy_ckpt_save_file",
        "str",
        values.text,
        "",
        "a path, or '' for none",
        PLANNED_MODES,
        "Where the plan is written each time a step is planned; `Plan.save_mindspore` writes MindSpore's JSON.",
        store=storage.store_entry("strategy_ckpt_config", "save_file"),
        in_plan=False,
    ),
    Option(
        "strategy_ckpt_config",
        "dict",
        values.strategy_ckpt_config,
        StrategyFiles("", "", True),
        "keys load_file (str), save_file (str), only_trainable_params (bool)",
        PLANNED_MODES,
        "Both strategy files in one dictionary; given keys are updated, the others kept. Plan files hold every tensor, whatever "
        "only_trainable_params says.",
        store=storage.store_entries("strategy_ckpt_config"),
        in_plan=False,
    ),
    Option(
        "group_ckpt_save_file",
        "str",
        values.refused_unless("", values.text, "JAX has no communication group files"),
        "",
        "only ''",
        (),
        "Refused by name: JAX has no communication group files.",
        in_plan=False,
    ),
    Option(
        "full_batch",
        "bool",
        values.boolean,
        False,
        "",
        PLANNED_MODES,
        "Every device is fed the whole batch; the same as dataset_strategy='full_batch'.",
        store=storage.store_full_batch,
    ),
    Option(
        "dataset_strategy",
        "str or tuple",
        values.dataset_strategy,
        "data_parallel",
        "'data_parallel', 'full_batch', or one tuple of ints >= 1, or one Layout, per batch input",
        PLANNED_MODES,
        "How each batch input is split, its other dimensions too; a Layout names the mesh axes. In auto_parallel the batch is free "
        "until this or full_batch is set.",
        store=storage.store_dataset_strategy,
    ),
    Option(
        "enable_parallel_optimizer",
        "bool",
        values.boolean,
        False,
        "",
        _REPLICAS,
        "Optimizer state is split over the replicas of its parameter (ZeRO).",
    ),
    Option(
        "parallel_optimizer_config",
        "dict",
        values.parallel_optimizer_config,
        ParallelOptimizerConfig(True, 64, -1, "level1"),
        "keys gradient_accumulation_shard (bool), parallel_optimizer_threshold (int >= 0, KB), "
        "optimizer_weight_shard_size (int > 0 or -1), optimizer_level ('level1', 'level2', 'level3')",
        _REPLICAS,
        "What the parallel optimizer splits; given keys are updated, the others kept.",
        store=storage.store_entries("parallel_optimizer_config"),
    ),
    Option(
        "optimizer_weight_shard_size",
        "int",
        values.weight_shard_size,
        -1,
        "> 0, or -1 for all replicas",
        _REPLICAS,
        "How many replicas share one copy of the optimizer state; the entry of parallel_optimizer_config.",
        store=storage.store_entry("parallel_optimizer_config", "optimizer_weight_shard_size"),
        same_as="parallel_optimizer_config",
    ),
    Option(
        "optimizer_weight_shard_aggregated_save",
        "bool",
        values.refused_unless(False, values.boolean, "checkpoints hold global arrays, so there is nothing to aggregate"),
        False,
        "only False",
        (),
        "Refused by name: checkpoints hold global arrays, so there is nothing to aggregate.",
    ),
    Option(
        "enable_alltoall",
        "bool",
        values.boolean,
        False,
        "",
        _DISTRIBUTED,
        "Whether a tensor may be moved from one split dimension to another by all-to-all where that is cheaper; False: by all-gather and "
        "slices. Unset in auto_parallel (`get` gives False): the search may use it.",
    ),
    Option(
        "all_reduce_fusion_config",
        "list",
        values.fusion_indices,
        (),
        "ascending ints >= 0, such as [20, 35]",
        _DISTRIBUTED,
        "Gradient all-reduces in buckets by index: [20, 35] is the first 20, the next 15, the rest. Unset or []: XLA's own combiner.",
        store=storage.store_fusion_indices,
    ),
    Option(
        "comm_fusion",
        "dict",
        values.comm_fusion,
        CommFusion(True, _AUTO_FUSION, _AUTO_FUSION, _AUTO_FUSION),
        "openstate (bool); allreduce, allgather, reducescatter: {mode: auto or size (allreduce: or index), config: MB > 0, or indices}",
        _DISTRIBUTED,
        "Fusion of collectives by size (auto: 64 MB) or index; of this and all_reduce_fusion_config the later call wins. Unset: XLA's own "
        "combiner. TPU combines no all-gathers, and CPU joins what it likes: a plan for them says so.",
        store=storage.store_comm_fusion,
    ),
    Option(
        "pipeline_stages",
        "int",
        values.integer(1),
        1,
        ">= 1, dividing device_num",
        PLANNED_MODES,
        "Stages into which the loss of spmdctx.value_and_grad is cut, each on its own devices; micro-batches run through them. "
        "PipelineCell or grad_accumulation_step says how many.",
    ),
    Option(
        "pipeline_config",
        "dict",
        values.pipeline_config,
        PipelineConfig(False, "1f1b"),
        "keys pipeline_interleave (bool), pipeline_scheduler ('gpipe', '1f1b', 'zero_bubble_v', or 'zero_bubble_h1', which MindSpore "
        "does not have); 'seqpipe', 'seqvpp' and 'seqsmartvpp' are refused by name",
        PLANNED_MODES,
        "In what order stages run micro-batches; given keys are updated, the others kept. pipeline_interleave gives each stage "
        "pipeline_segments chunks of the loss, and needs micro-batches in a multiple of pipeline_stages.",
        store=storage.store_entries("pipeline_config"),
    ),
    Option(
        "pipeline_segments",
        "int",
        values.integer(1),
        2,
        ">= 1",
        PLANNED_MODES,
        "Chunks of the loss on each stage with pipeline_interleave. zero_bubble_v always has two.",
    ),
    Option("auto_pipeline", "bool", values.boolean, False, "", _AUTO, "Chooses 1 to pipeline_stages stages, and the schedule if unset."),
    Option(
        "grad_accumulation_step",
        "int",
        values.integer(1),
        1,
        ">= 1",
        PARALLEL_MODES,
        "Micro-batches per step of `spmdctx.value_and_grad`; gradients are averaged over them and reduced once (in pipelines, "
        "each time). No effect on plain `jax.grad`.",
    ),
    Option(
        "communi_parallel_mode",
        "str",
        values.refused_unless(
            "all_group_parallel",
            values.choice(("all_group_parallel", "same_server_group_parallel", "no_group_parallel")),
            "XLA schedules its own communication",
        ),
        "all_group_parallel",
        "only 'all_group_parallel'",
        (),
        "Refused by name: XLA schedules its own communication.",
    ),
    Option(
        "mem_coeff",
        "float",
        values.positive_number(),
        0.1,
        "> 0",
        _AUTO,
        "recursive_programming: price of splitting a matmul along its rows, which keeps the weight whole; a larger one splits weights more "
        "and saves memory.",
    ),
)

ALGO_OPTIONS: tuple[Option, ...] = (
    Option(
        "fully_use_devices",
        "bool",
        values.boolean,
        True,
        "",
        _AUTO,
        "Each op uses all devices or none. Unset (`get` gives True): nothing is restricted.",
        quiet=False,
    ),
    Option(
        "elementwise_op_strategy_follow", "bool", values.boolean, False, "", _AUTO, "Element-wise ops take the sharding of their operands."
    ),
    Option(
        "tensor_slice_align_enable",
        "bool",
        values.boolean,
        False,
        "",
        _AUTO,
        "Slices of matmul operands keep a multiple of tensor_slice_align_size.",
    ),
    Option("tensor_slice_align_size", "int", values.integer(1, 1024), 16, "1 to 1024", _AUTO, "The multiple."),
    Option("enable_algo_approxi", "bool", values.boolean, False, "", _AUTO, "The search may approximate."),
    Option("algo_approxi_epsilon", "float", values.positive_number(1.0), 0.1, "in (0, 1]", _AUTO, "How far it may."),
)

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}
ALGO_BY_NAME: dict[str, Option] = {option.name: option for option in ALGO_OPTIONS}
_HINTS = {key: f"it is a key of {option.name}" for option in OPTIONS for key in getattr(option.default, "_fields", ())}
_HINTS |= dict.fromkeys(LATER_OPTIONS, "it belongs to MindSpore versions after 2.0")


def find(key: Any, verb: str, table: Mapping[str, Option] = BY_NAME, also: Iterable[str] = ()) -> Option:
    """Returns the option of that name.

    Args:
        key: The name that the user wrote.
        verb: "Set" or "Get", for the message.
        table: The options to search.
        also: Other names that the message may suggest.

    Raises:
        TypeError: `key` is not a string.
        ContextError: there is no such option; the message names the nearest one.
    """
    if not isinstance(key, str):
        raise TypeError(message(f"{verb} context needs the name of an option.", got=shown(key), need="a string"))
    option = table.get(key)
    if option is None:
        if table is ALGO_BY_NAME:
            fix = values.nearest(key, table) or f"the parameters are {', '.join(table)}"
            raise ContextError(f"{verb} algo parameter {shown(key)} is not recognized.", fix=fix)
        fix = _HINTS.get(key) or values.nearest(key, [*table, *also]) or "get_auto_parallel_context and docs/options.md list the options"
        raise ContextError(f"{verb} context keyword {shown(key)} is not recognized.", fix=fix)
    return option


def checked(options: Mapping[str, Any], table: Mapping[str, Option] = BY_NAME, also: Iterable[str] = ()) -> dict[str, Any]:
    """Returns all values in normal form; raises on the first bad name or value, so that a caller changes all or nothing."""
    found = [(find(name, "Set", table, also), value) for name, value in options.items()]
    return {option.name: option.check(option.name, value) for option, value in found}
