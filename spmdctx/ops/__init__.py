"""Collectives for local losses and shard_maps, modeled on MindSpore's communication operators."""

from spmdctx.ops.exchanges import AllGather, AlltoAll, Broadcast, NeighborExchange
from spmdctx.ops.reductions import AllReduce, ReduceOp, ReduceScatter

__all__ = ["AllGather", "AllReduce", "AlltoAll", "Broadcast", "NeighborExchange", "ReduceOp", "ReduceScatter"]
