"""What the context says of a program's collectives, as far as the program itself is written for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from spmdctx.context.state import AutoParallelContext
from spmdctx.cost.memory.early_updates import EarlyUpdate
from spmdctx.cost.shared_reads import Routes
from spmdctx.ir.analysis.gradient_order import Gradient, gradient_order
from spmdctx.ir.graph import LOW, Graph
from spmdctx.ir.primitives import WIDENED
from spmdctx.machine.xla.overlap import sides
from spmdctx.trace.build.program import Program


class Wishes(NamedTuple):
    """What lowering writes into a program.

    Attributes:
        all_to_all: whether a reshard may be one; as in the prices.
        widened: values whose partial results are added up and reduced in float32.
        buckets: of sums that make up gradients, the number of the bucket in which they are reduced.
        routes: shardings through which values get to the matrix products of a computation.
        scratch_bytes: what the chip holds of an operand while a matrix product and an update of state with it are computed at once;
            0 where the compiler computes them apart anyway.
        early: updates of state for which the rest of the step waits.
        groups: of sums of `shard(fusion=)` that make up no gradients, the number of the group in which they are reduced.
    """

    all_to_all: bool = True
    widened: frozenset[int] = frozenset()
    buckets: Mapping[int, int] = MappingProxyType({})
    routes: Routes = MappingProxyType({})
    scratch_bytes: int = 0
    groups: Mapping[int, int] = MappingProxyType({})
    early: tuple[EarlyUpdate, ...] = ()

    @property
    def tied(self) -> Mapping[int, int]:
        """The groups of all sums that have one; those of gradients are reduced last."""
        first = max(self.buckets.values(), default=-1) + 1
        return {**self.buckets, **{value: first + number for value, number in self.groups.items()}} if self.groups else self.buckets


NO_WISHES = Wishes()


def _widened(graph: Graph) -> frozenset[int]:
    """The low-precision sums that end in gradients, and in nothing that a matrix product reads."""
    found = [
        value
        for op in graph.ops
        if op.primitive in WIDENED and op.rule.combiner == "add"
        for value in op.results
        if graph.values[value].dtype in LOW
    ]
    if not found:
        return frozenset()
    terminal = sides(graph).terminal
    return frozenset(value for value in found if terminal[value])


def wishes_of(program: Program, context: AutoParallelContext, routes: Routes = NO_WISHES.routes, scratch_bytes: int = 0) -> Wishes:
    """What the context, and `shard(fusion=)` in the step, ask for; `routes` are those of the plan, `scratch_bytes` the machine's."""
    return Wishes(
        context.allows_all_to_all,
        _widened(program.graph) if context.gradient_fp32_sync else frozenset(),
        _buckets(program.graph, context) if context.fuses_by_index or program.region_ops else {},
        routes,
        scratch_bytes,
    )


def _buckets(graph: Graph, context: AutoParallelContext) -> dict[int, int]:
    gradients = gradient_order(graph)
    return sum_buckets(gradients, gradient_buckets(graph, context, gradients))


_PLANNED = ("semi_auto_parallel", "auto_parallel")


def gradient_buckets(graph: Graph, context: AutoParallelContext, gradients: Sequence[Gradient]) -> tuple[int | None, ...]:
    """The bucket of each gradient, None where it has none.

    [3, 10] is the first three, the next seven, the rest. What is used inside of a `shard(fusion=)` has a bucket per number, and what is
    left without either shares one. Buckets are numbered by their first gradient.
    """
    by_index = context.all_reduce_fusion_config if context.fuses_by_index else ()
    by_number = [0] * len(gradients)
    if context.parallel_mode in _PLANNED:
        made = graph.producers
        by_number = [graph.origins[made[one.sums[0]]].fusion for one in gradients]
    if not by_index and not any(by_number):
        return (None,) * len(gradients)
    keys = [(number, 0 if number else sum(index >= one for one in by_index)) for index, number in enumerate(by_number)]
    order = list(dict.fromkeys(keys))
    return tuple(order.index(key) for key in keys)


def sum_buckets(gradients: Sequence[Gradient], buckets: Sequence[int | None]) -> dict[int, int]:
    """Per sum that makes up a gradient the bucket of that gradient; of several gradients that it is cut into, the first one's."""
    found: dict[int, int] = {}
    for gradient, bucket in zip(gradients, buckets, strict=True):
        if bucket is not None:
            found |= {value: bucket for value in gradient.sums if value not in found}
    return found
