"""Collectives for losses and shard_maps that are each device's own, after MindSpore's communication operators."""

from spmdctx.ops.exchanges import AllGather, AlltoAll, Broadcast, NeighborExchange
from spmdctx.ops.reductions import AllReduce, ReduceOp, ReduceScatter

__all__ = ["AllGather", "AllReduce", "AlltoAll", "Broadcast", "NeighborExchange", "ReduceOp", "ReduceScatter"]
