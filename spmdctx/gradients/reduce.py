"""Gradients of all replicas to one: summed or averaged, in which type, and in which buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdctx.errors import UnsupportedError
from spmdctx.gradients.options import GradientOptions


def is_low_precision(dtype: Any) -> bool:
    """Whether a floating type has fewer bits than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def reduce_gradients(
    gradients: Sequence[Any], dtypes: Sequence[Any], scatter_dims: Sequence[int | None], order: Sequence[int], options: GradientOptions
) -> list[Any]:
    """Sums gradients over the replicas, or averages them.

    Args:
        gradients: of this replica; accumulated ones may be of a higher precision than the parameter's.
        dtypes: what they are given back in.
        scatter_dims: the dimension along which this replica gets its piece of a sum only, None where it gets all of it.
        order: the gradients, by number, in the order in which the forward pass first uses their parameters.
        options: of the gradients.
    """
    received: dict[int, Any] = {}
    for index, dim in enumerate(scatter_dims):
        if dim is not None:
            own = gradients[index]
            received[index] = own if options.splits_accumulators else scatter_gradient(own, dtypes[index], dim, options)
    for number, bucket in enumerate(buckets_of(order, options)):
        whole = [index for index in bucket if index not in received]
        groups = None if options.buckets is None else groups_of(options.num_replicas, number)
        sent = tuple(_sent(gradients[index], dtypes[index], options) for index in whole)
        received.update(zip(whole, jax.lax.psum(sent, options.mesh.names, axis_index_groups=groups) if sent else (), strict=True))
    divisor = options.num_replicas if options.mean else 1
    return [(received[index] / divisor if divisor > 1 else received[index]).astype(dtype) for index, dtype in enumerate(dtypes)]


def scatter_gradient(gradient: Any, dtype: Any, dim: int, options: GradientOptions) -> Any:
    """This replica's piece, along `dim`, of the sum of a gradient over the replicas."""
    return jax.lax.psum_scatter(_sent(gradient, dtype, options), options.mesh.names, scatter_dimension=dim, tiled=True)


def _sent(gradient: Any, dtype: Any, options: GradientOptions) -> Any:
    if not is_low_precision(dtype):
        return gradient
    if not options.float32:
        return gradient.astype(dtype)
    # Between two casts the TPU compiler would reduce what is cast instead.
    return gradient if gradient.dtype == jnp.float32 else jax.lax.optimization_barrier(gradient.astype(jnp.float32))


def buckets_of(order: Sequence[int], options: GradientOptions) -> list[tuple[int, ...]]:
    """The gradients of each all-reduce; one bucket where XLA combines as it likes."""
    ends = () if options.buckets is None else options.buckets
    starts = [0, *ends]
    parts = [tuple(order[start:stop]) for start, stop in zip(starts, [*ends, len(order)], strict=True)]
    return [part for part in parts if part]


def groups_of(count: int, number: int) -> list[list[int]]:
    """All devices as one group, in an order that no other bucket has: XLA combines all-reduces of equal groups only.

    Raises:
        UnsupportedError: more buckets than the devices have orders.
    """
    if number >= math.factorial(count):
        raise UnsupportedError(
            f"Gradients of {count} devices can be kept apart in {math.factorial(count)} buckets only.",
            got=f"all_reduce_fusion_config with bucket {number}",
            fix="use fewer indices",
        )
    rest, order = list(range(count)), []
    for left in range(count, 0, -1):
        number, place = divmod(number, left)
        order.append(rest.pop(place))
    return [order]
