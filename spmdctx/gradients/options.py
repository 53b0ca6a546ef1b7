"""What the context asks of gradients, as one step resolves it."""

from __future__ import annotations

from typing import NamedTuple

from spmdctx.context.layers import AutoParallelContext
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.search.optimizer.asked import optimizer_sharding
from spmdctx.search.setup.request import ALL_REPLICAS, OptimizerSharding

LOCAL_MODES = ("data_parallel", "hybrid_parallel")


class GradientOptions(NamedTuple):
    """What `spmdctx.value_and_grad` does in one step.

    `mesh` is that of the replicas, of one device where the loss is global; `buckets` are the ends of all index buckets but the
    last, None where XLA's combiner decides; `optimizer` is what the parallel optimizer splits, None where it is off.
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
        """Whether gradients of parameters that the parallel optimizer splits leave the loss in pieces."""
        asked = self.optimizer
        return self.is_local and asked is not None and asked.shard_size == ALL_REPLICAS

    @property
    def splits_accumulators(self) -> bool:
        """Whether those are accumulated in pieces, and so reduced once per micro-batch."""
        return self.scatters and self.optimizer is not None and self.optimizer.splits_accumulators and self.micro_batches > 1

    @property
    def accumulates_whole(self) -> bool:
        """Whether they are not although the parallel optimizer asks for it."""
        asked = self.optimizer
        return self.is_local and asked is not None and asked.splits_accumulators and self.micro_batches > 1 and not self.scatters

    @property
    def num_replicas(self) -> int:
        """Devices with a loss of their own."""
        return self.mesh.num_devices

    @property
    def is_local(self) -> bool:
        """Whether each device has a loss of its own."""
        return self.mesh.num_devices > 1

    @property
    def acts(self) -> bool:
        """Whether anything differs from JAX's own transformation."""
        return self.is_local or self.micro_batches > 1


def gradient_options(context: AutoParallelContext, num_devices: int, mesh: LogicalMesh | None) -> GradientOptions:
    """The options of a step that runs on so many devices, on `mesh` where one was given."""
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
