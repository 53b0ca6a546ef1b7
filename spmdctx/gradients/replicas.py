"""Local losses: the shard_map in which each device differentiates its own loss, and in which results are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmdctx.gradients.dependence import first_uses
from spmdctx.gradients.keys import fold
from spmdctx.gradients.loss import LossCall, Traced
from spmdctx.gradients.micro_batches import run_micro_batches
from spmdctx.gradients.operands import Operand
from spmdctx.gradients.options import GradientOptions
from spmdctx.gradients.reduce import reduce_gradients
from spmdctx.gradients.results import Fate, Row
from spmdctx.ir.sharding import TensorSharding
from spmdctx.trace.build.shard_maps import LOSS_SCOPE


def run_on_replicas(
    call: LossCall,
    traced: Traced,
    operands: Sequence[Operand],
    rows: Sequence[Row],
    order: Sequence[int],
    options: GradientOptions,
    mesh: Any,
) -> list[Any]:
    """Runs a call in which each device differentiates the loss of its own shard; `order` comes from `gradient_order`."""

    def replica(*leaves: Any) -> list[Any]:
        place = jax.lax.axis_index(options.mesh.names)
        own = [fold(leaf, place) if operand.is_key else leaf for leaf, operand in zip(leaves, operands, strict=True)]
        results = run_micro_batches(call, traced, operands, rows, own, options)
        return _joined(results, traced, rows, order, options)

    mapped = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=tuple(_spec(operand.sharding) for operand in operands),
        out_specs=[_spec(row.sharding) for row in rows],
        check_vma=False,
    )
    with jax.named_scope(LOSS_SCOPE):
        return list(mapped(*call.values))


def gradient_order(call: LossCall, traced: Traced, rows: Sequence[Row]) -> list[int]:
    """Returns the results that are reduced gradients, in the order in which the forward pass first uses their parameters."""
    uses = first_uses(traced.jaxpr)
    last = max(uses, default=0) + 1

    def first_use(index: int) -> int:
        primal = call.primal(traced.results[index])
        return last if primal is None else uses[primal]

    return sorted((index for index, row in enumerate(rows) if row.fate is Fate.REDUCED), key=first_use)


def _joined(results: Sequence[Any], traced: Traced, rows: Sequence[Row], order: Sequence[int], options: GradientOptions) -> list[Any]:
    joined = list(results)
    dtypes = [traced.jaxpr.out_avals[index].dtype for index in order]
    scatter_dims = [rows[index].scatter_dim for index in order]
    reduced = reduce_gradients([results[index] for index in order], dtypes, scatter_dims, range(len(order)), options)
    for index, gradient in zip(order, reduced, strict=True):
        joined[index] = gradient
    for index, row in enumerate(rows):
        if row.fate is Fate.AVERAGED:
            joined[index] = jax.lax.pmean(results[index], options.mesh.names)
        dtype = traced.jaxpr.out_avals[index].dtype
        if joined[index].dtype != dtype:
            joined[index] = joined[index].astype(dtype)
    return joined


def _spec(sharding: TensorSharding) -> PartitionSpec:
    return PartitionSpec(*[names or None for names in sharding])
