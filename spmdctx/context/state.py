"""The state of the context: a frozen, hashable value that a step reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from spmdctx.context.options import ALGO_BY_NAME, ALGO_OPTIONS, BY_NAME, OPTIONS, checked
from spmdctx.context.servers import DEFAULT_SERVERS, ServerOptions
from spmdctx.context.storage import Option
from spmdctx.context.values import CommFusion, DatasetStrategy, ParallelOptimizerConfig, PipelineConfig, StrategyFiles, plain


@dataclass(frozen=True)
class AlgoParameters:
    """Parameters of the search; `explicit` names those the user set."""

    fully_use_devices: bool
    elementwise_op_strategy_follow: bool
    tensor_slice_align_enable: bool
    tensor_slice_align_size: int
    enable_algo_approxi: bool
    algo_approxi_epsilon: float
    explicit: frozenset[str] = frozenset()


DEFAULT_ALGO = AlgoParameters(**{option.name: option.default for option in ALGO_OPTIONS})


@dataclass(frozen=True)
class AutoParallelContext:
    """All options in normal form: frozen, hashable, one attribute per option.

    `explicit` names the options the user set, in whichever layer. `index_fusion` is True where the last call that chose
    the fusion of all-reduces asked for buckets by index; the indices are in `all_reduce_fusion_config`.
    """

    device_num: int
    global_rank: int
    gradients_mean: bool
    gradient_fp32_sync: bool
    loss_repeated_mean: bool
    parallel_mode: str
    search_mode: str
    sharding_propagation: bool
    parameter_broadcast: bool
    strategy_ckpt_config: StrategyFiles
    group_ckpt_save_file: str
    full_batch: bool
    dataset_strategy: DatasetStrategy
    enable_parallel_optimizer: bool
    parallel_optimizer_config: ParallelOptimizerConfig
    optimizer_weight_shard_aggregated_save: bool
    enable_alltoall: bool
    all_reduce_fusion_config: tuple[int, ...]
    comm_fusion: CommFusion
    pipeline_stages: int
    pipeline_config: PipelineConfig
    pipeline_segments: int
    auto_pipeline: bool
    grad_accumulation_step: int
    communi_parallel_mode: str
    mem_coeff: float
    index_fusion: bool = False
    explicit: frozenset[str] = frozenset()
    algo: AlgoParameters = DEFAULT_ALGO
    servers: ServerOptions = DEFAULT_SERVERS

    @property
    def auto_parallel_search_mode(self) -> str:
        """The older name of search_mode."""
        return self.search_mode

    @property
    def strategy_ckpt_load_file(self) -> str:
        """The entry of strategy_ckpt_config."""
        return self.strategy_ckpt_config.load_file

    @property
    def strategy_ckpt_save_file(self) -> str:
        """The entry of strategy_ckpt_config."""
        return self.strategy_ckpt_config.save_file

    @property
    def optimizer_weight_shard_size(self) -> int:
        """The entry of parallel_optimizer_config."""
        return self.parallel_optimizer_config.optimizer_weight_shard_size

    @property
    def effective_search_mode(self) -> str:
        """The search that auto_parallel runs: the older switch sharding_propagation counts too."""
        return "sharding_propagation" if self.sharding_propagation else self.search_mode

    @property
    def bucket_indices(self) -> tuple[int, ...] | None:
        """The indices at which buckets of gradients begin; None where gradients have no buckets by index."""
        asked = self.index_fusion and self.comm_fusion.openstate and self.parallel_mode != "stand_alone"
        return self.all_reduce_fusion_config if asked else None

    @property
    def fuses_by_index(self) -> bool:
        """True if gradients are reduced in buckets by index."""
        return self.bucket_indices is not None

    @property
    def batch_is_pinned(self) -> bool:
        """True if the user said how the batch is split; otherwise it is free in auto_parallel."""
        return not self.explicit.isdisjoint(("dataset_strategy", "full_batch"))

    @property
    def allows_all_to_all(self) -> bool:
        """True if a plan may hold all-to-alls.

        That is the case if the user enables them, or says nothing and leaves the plan to the search.
        """
        is_free = self.parallel_mode in ("stand_alone", "auto_parallel") and not self.is_set("enable_alltoall")
        return self.enable_alltoall or is_free

    def is_set(self, name: str) -> bool:
        """Returns whether the user set the option, by either of its names."""
        return name in self.explicit

    def value(self, option: Option) -> Any:
        """Returns the option's value in normal form."""
        return getattr(self, option.name)

    def replace(self, **options: Any) -> AutoParallelContext:
        """Returns this context with further options, which are checked.

        Raises:
            ContextError: a name is unknown or a value is bad.
            TypeError: a value has the wrong type.
            UnsupportedError: JAX has no counterpart of an option.
        """
        return self.with_checked(checked(options))

    def plan_options(self) -> tuple[tuple[str, Any], ...]:
        """Returns the options that differ from their defaults, in table order, as `get` returns them; leaves out paths and ranks."""
        rows = [(option, self.value(option)) for option in OPTIONS if option.in_plan and not option.same_as]
        found = [(option.name, plain(value)) for option, value in rows if value != option.default or self._acts_unlike_unset(option.name)]
        algo = [(name, getattr(self.algo, name)) for name in ALGO_BY_NAME if name in self.algo.explicit]
        return tuple(found + algo)

    def _acts_unlike_unset(self, name: str) -> bool:
        return name == "enable_alltoall" and self.is_set(name) and self.parallel_mode == "auto_parallel"

    def with_checked(self, values: Mapping[str, Any]) -> AutoParallelContext:
        """Returns this context with further options whose values are in normal form."""
        if not values:
            return self
        state = {name: getattr(self, name) for name in _FIELDS}
        for name, value in values.items():
            BY_NAME[name].write(state, value)
        names = {"search_mode" if name == "auto_parallel_search_mode" else name for name in values}
        return AutoParallelContext(**{**state, "explicit": self.explicit | names})

    def with_algo(self, algo: AlgoParameters) -> AutoParallelContext:
        """Returns this context with other search parameters."""
        state = {name: getattr(self, name) for name in _FIELDS}
        return AutoParallelContext(**{**state, "algo": algo})

    def with_servers(self, servers: ServerOptions) -> AutoParallelContext:
        """Returns this context with other options of the parameter server."""
        state = {name: getattr(self, name) for name in _FIELDS}
        return AutoParallelContext(**{**state, "servers": servers})


_FIELDS = tuple(field.name for field in fields(AutoParallelContext))
DEFAULT_CONTEXT = AutoParallelContext(**{option.name: option.default for option in OPTIONS if option.name in _FIELDS})
