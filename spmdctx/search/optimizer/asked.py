"""The context's options of the parallel optimizer, read as the request to split its state."""

from __future__ import annotations

from spmdctx.context.layers import AutoParallelContext
from spmdctx.context.options import BY_NAME
from spmdctx.context.values import OPTIMIZER_LEVELS
from spmdctx.search.setup.request import OptimizerSharding


def optimizer_sharding(context: AutoParallelContext) -> OptimizerSharding | None:
    """Returns the state that the parallel optimizer splits; None where it is off or the mode has none."""
    if not context.enable_parallel_optimizer or context.parallel_mode not in BY_NAME["enable_parallel_optimizer"].modes:
        return None
    asked = context.parallel_optimizer_config
    return OptimizerSharding(
        level=OPTIMIZER_LEVELS.index(asked.optimizer_level) + 1,
        threshold_bytes=asked.parallel_optimizer_threshold * 1024,
        shard_size=asked.optimizer_weight_shard_size,
        splits_accumulators=asked.gradient_accumulation_shard,
    )
