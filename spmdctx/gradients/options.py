"""The gradient options of the context, resolved for one step."""

from __future__ import annotations

from typing import NamedTuple

from spmdctx.context.layers import AutoParallelContext
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.search.optimizer.asked import optimizer_sharding
from spmdctx.search.setup.request import ALL_REPLICAS, OptimizerSharding

LOCAL_MODES = ("data_parallel", "hybrid_parallel")


class GradientOptions(NamedTuple):
    """How `spmdctx.value_and_grad` behaves in one step.

    `mesh` holds the replicas; it has one device if the loss is global. `buckets` are the ends of all index buckets except the
    last, or None if XLA's combiner decides. `optimizer` tells what the parallel optimizer splits, and is None if it is off.
    """

    mesh: LogicalMesh
    mean: bool
    float32: bool
    repeated_mean: bool
    micro_batches: int
    buckets: tuple[int, ...] | None
    optimizer: OptimizerSharding | None = None

    @property
    def scatters(self) -> bool:
        """True if gradients of parameters that the parallel optimizer splits leave the loss in pieces."""
        asked = self.optimizer
        return self.is_local and asked is not None and asked.shard_size == ALL_REPLICAS

    @property
    def splits_accumulators(self) -> bool:
        """True if those gradients are accumulated in pieces, and so reduced once for each micro-batch."""
        return self.scatters and self.optimizer is not None and self.optimizer.splits_accumulators and self.micro_batches > 1

    @property
    def accumulates_whole(self) -> bool:
        """True if gradients are accumulated whole although the parallel optimizer asks for pieces."""
        asked = self.optimizer
        return self.is_local and asked is not None and asked.splits_accumulators and self.micro_batches > 1 and not self.scatters

    @property
    def num_replicas(self) -> int:
        """Devices with a loss of their own."""
        return self.mesh.num_devices

    @property
    def is_local(self) -> bool:
        """True if each device has a loss of its own."""
        return self.mesh.num_devices > 1

    @property
    def acts(self) -> bool:
        """True if anything differs from JAX's own transformation."""
        return self.is_local or self.micro_batches > 1


def gradient_options(context: AutoParallelContext, num_devices: int, mesh: LogicalMesh | None) -> GradientOptions:
    """Resolves the options of a step that runs on so many devices, on `mesh` if one was given."""
    replicas = num_devices if context.parallel_mode in LOCAL_MODES else 1
    return GradientOptions(
        mesh=mesh if mesh is not None and replicas > 1 else LogicalMesh.of({"data": replicas}),
        mean=context.gradients_mean,
        float32=context.gradient_fp32_sync,
        repeated_mean=context.loss_repeated_mean,
        micro_batches=context.grad_accumulation_step,
        buckets=context.bucket_indices,
        optimizer=optimizer_sharding(context),
    )
