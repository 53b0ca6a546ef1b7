"""Batches on their devices: split as a plan says, each process reading only its part."""

from spmdctx.data.arrays import arrays
from spmdctx.data.lazy import Blocks
from spmdctx.data.sharded import ShardedBatches, shard

__all__ = ["Blocks", "ShardedBatches", "arrays", "shard"]
