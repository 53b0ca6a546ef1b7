"""What the context says of a program's collectives, as far as the program itself is written for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from spmdctx.context_state import AutoParallelContext
from spmdctx.ir import Graph
from spmdctx.search.gradient_order import sum_buckets


class Wishes(NamedTuple):
    """What lowering writes into a program.

    Attributes:
        all_to_all: whether a reshard may be one; as in the prices.
        buckets: of sums that make up gradients, the number of the bucket in which they are reduced.
    """

    all_to_all: bool = True
    buckets: Mapping[int, int] = MappingProxyType({})


NO_WISHES = Wishes()


def wishes_of(graph: Graph, context: AutoParallelContext) -> Wishes:
    """What the context asks for in a step."""
    return Wishes(context.allows_all_to_all, sum_buckets(graph, context.all_reduce_fusion_config) if context.fuses_by_index else {})
