"""Gradients of all replicas to one: summed or averaged, in which type, and in which buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdctx.gradients.options import GradientOptions


def is_low_precision(dtype: Any) -> bool:
    """Whether a floating type has fewer bits than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def reduce_gradients(gradients: Sequence[Any], dtypes: Sequence[Any], order: Sequence[int], options: GradientOptions) -> list[Any]:
    """Sums gradients over the replicas, or averages them.

    Args:
        gradients: of this replica; accumulated ones may be of a higher precision than the parameter's.
        dtypes: what they are given back in.
        order: the gradients, by number, in the order in which the forward pass first uses their parameters.
        options: of the gradients.
    """
    sent = [_sent(gradient, dtype, options) for gradient, dtype in zip(gradients, dtypes, strict=True)]
    received: dict[int, Any] = {}
    for number, bucket in enumerate(buckets_of(order, options)):
        # XLA combines all-reduces of equal groups only: each bucket lists the same devices, turned by one more.
        groups = None if options.buckets is None else _turned(options.num_replicas, number)
        sums = jax.lax.psum(tuple(sent[index] for index in bucket), options.mesh.names, axis_index_groups=groups)
        received.update(zip(bucket, sums, strict=True))
    return [averaged(received[index], dtype, options) for index, dtype in enumerate(dtypes)]


def scatter_gradient(gradient: Any, dtype: Any, dim: int, options: GradientOptions) -> Any:
    """This replica's piece, along `dim`, of the sum of a gradient over the replicas."""
    return jax.lax.psum_scatter(_sent(gradient, dtype, options), options.mesh.names, scatter_dimension=dim, tiled=True)


def averaged(total: Any, dtype: Any, options: GradientOptions) -> Any:
    """A sum over the replicas as the context asks for it, in the gradient's type."""
    divisor = options.num_replicas if options.mean else 1
    return (total / divisor if divisor > 1 else total).astype(dtype)


def _sent(gradient: Any, dtype: Any, options: GradientOptions) -> Any:
    if not is_low_precision(dtype):
        return gradient
    return gradient.astype(jnp.float32 if options.float32 else dtype)


def buckets_of(order: Sequence[int], options: GradientOptions) -> list[tuple[int, ...]]:
    """The gradients of each all-reduce; one bucket where XLA combines as it likes."""
    ends = () if options.buckets is None else options.buckets
    starts = [0, *ends]
    parts = [tuple(order[start:stop]) for start, stop in zip(starts, [*ends, len(order)], strict=True)]
    return [part for part in parts if part]


def _turned(count: int, places: int) -> list[list[int]]:
    places %= count
    return [[*range(places, count), *range(places)]]
