"""Reduces gradients over replicas: sums or averages them, in the right type and in buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdctx.errors import UnsupportedError
from spmdctx.gradients.options import GradientOptions


def is_low_precision(dtype: Any) -> bool:
    """Returns whether a floating type has fewer bits than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def reduce_gradients(
    gradients: Sequence[Any], dtypes: Sequence[Any], scatter_dims: Sequence[int | None], order: Sequence[int], options: GradientOptions
) -> list[Any]:
    """Sums gradients over the replicas, or averages them.

    Args:
        gradients: this replica's gradients; accumulated ones may have a higher precision than the parameter.
        dtypes: the types of the results.
        scatter_dims: the dimension along which this replica gets only its piece of a sum, None if it gets the whole sum.
        order: the gradients, by number, in the order in which the forward pass first uses their parameters.
        options: the gradient options.
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
    """Returns this replica's piece, along `dim`, of the sum of a gradient over the replicas."""
    return jax.lax.psum_scatter(_sent(gradient, dtype, options), options.mesh.names, scatter_dimension=dim, tiled=True)


def _sent(gradient: Any, dtype: Any, options: GradientOptions) -> Any:
    if not is_low_precision(dtype):
        return gradient
    if not options.float32:
        return gradient.astype(dtype)
    # The TPU compiler would move a reduction between two casts to before the first.
    return gradient if gradient.dtype == jnp.float32 else jax.lax.optimization_barrier(gradient.astype(jnp.float32))


def buckets_of(order: Sequence[int], options: GradientOptions) -> list[tuple[int, ...]]:
    """Returns the gradients of each all-reduce; all are in one bucket if XLA's combiner decides."""
    ends = () if options.buckets is None else options.buckets
    starts = [0, *ends]
    parts = [tuple(order[start:stop]) for start, stop in zip(starts, [*ends, len(order)], strict=True)]
    return [part for part in parts if part]


def groups_of(count: int, number: int) -> list[list[int]]:
    """Returns all devices as one group, in an order that no other bucket has: XLA combines only all-reduces of equal groups.

    Raises:
        UnsupportedError: there are more buckets than orders of the devices.
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
