"""The gradients of a step in their order, and the buckets in which they are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from spmdctx.context.state import AutoParallelContext
from spmdctx.ir.analysis.gradient_order import Gradient, gradient_order
from spmdctx.ir.graph import Graph

_PLANNED = ("semi_auto_parallel", "auto_parallel")


class BucketedGradients(NamedTuple):
    """The gradients of a step, the bucket of each (None if it has none), and the bucket of each sum that makes up a gradient.

    A sum that is cut into several gradients has the bucket of the first.
    """

    ordered: tuple[Gradient, ...]
    buckets: tuple[int | None, ...]
    by_sum: Mapping[int, int]


NO_GRADIENTS = BucketedGradients((), (), MappingProxyType({}))


def bucketed_gradients(graph: Graph, context: AutoParallelContext) -> BucketedGradients:
    """Returns the gradients of a step with the buckets that its context and `shard(fusion=)` ask for."""
    ordered = gradient_order(graph)
    buckets = _buckets(graph, context, ordered)
    by_sum: dict[int, int] = {}
    for gradient, bucket in zip(ordered, buckets, strict=True):
        if bucket is not None:
            by_sum |= {value: bucket for value in gradient.sums if value not in by_sum}
    return BucketedGradients(ordered, buckets, by_sum)


def _buckets(graph: Graph, context: AutoParallelContext, gradients: Sequence[Gradient]) -> tuple[int | None, ...]:
    """Returns the bucket of each gradient, None if it has none.

    Indices [3, 10] make three buckets: the first three gradients, the next seven, the rest. Gradients of what `shard(fusion=)` regions
    use have a bucket per number, and those with neither share one. Buckets are numbered by their first gradient.
    """
    by_index = context.bucket_indices or ()
    by_number = [0] * len(gradients)
    if context.parallel_mode in _PLANNED:
        made = graph.producers
        by_number = [graph.origins[made[one.sums[0]]].fusion for one in gradients]
    if not by_index and not any(by_number):
        return (None,) * len(gradients)
    keys = [(number, 0 if number else sum(index >= one for one in by_index)) for index, number in enumerate(by_number)]
    order = list(dict.fromkeys(keys))
    return tuple(order.index(key) for key in keys)
