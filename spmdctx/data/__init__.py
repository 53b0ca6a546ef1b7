"""Batches on their devices: split as a plan says, each process reading only its part."""

from spmdctx.data.arrays import arrays
from spmdctx.data.batch_size import global_batch_size
from spmdctx.data.lazy import Blocks
from spmdctx.data.process_shard import ProcessShard, process_shard
from spmdctx.data.sharded import ShardedBatches, shard

__all__ = ["Blocks", "ProcessShard", "ShardedBatches", "arrays", "global_batch_size", "process_shard", "shard"]
