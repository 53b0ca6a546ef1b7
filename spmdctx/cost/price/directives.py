"""Everything that a program says besides shardings: decided once, priced here, written by lowering, and listed in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spmdctx.context.state import AutoParallelContext
from spmdctx.cost.memory.early_updates import EarlyUpdate
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.gradients import NO_GRADIENTS, BucketedGradients, bucketed_gradients
from spmdctx.cost.price.groups import region_groups
from spmdctx.cost.shared_reads import Routes, shared_reads
from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.analysis.loop_sums import NO_HOLDS, Holds, holds_of, loop_sums
from spmdctx.ir.graph import LOW, Graph
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.primitives import WIDENED
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.xla.bias_sums import written_once
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.machine.xla.partitioner.equal_values import moved_values
from spmdctx.machine.xla.partitioner.recompute import recomputed_values, sliced_values
from spmdctx.machine.xla.partitioner.repetition import repeated_values
from spmdctx.machine.xla.update_fusion import unfused_updates


@dataclass(frozen=True)
class Directives:
    """The directives of a program: everything that it says besides shardings.

    Attributes:
        all_to_all: whether a reshard may be one.
        widened: values whose partial results are added up and reduced in float32.
        gradients: the gradients of the step, and the bucket in which each is reduced.
        groups: for sums of `shard(fusion=)` that make up no gradients, the number of the group in which they are reduced.
        loop_sums: the sums that loops leave partial until they are complete.
        routes: shardings through which values get to the matrix products of a computation.
        unfused_updates: for matrix products, the gradient that a barrier keeps apart from the update of its state.
        written_once: sums of a product and a bias that a barrier puts in the product's place.
        waits: updates of state for which the rest of the step waits; decided where memory is counted.
        moved: values that some op takes in another sharding than the stored one; all readers take them from one constraint.
        recomputed: values that exist only on the way into their readers, which compute slices of them for themselves.
        repeated: values that are repeated, whole, for readers that split the repetition differently.
    """

    all_to_all: bool = True
    widened: frozenset[int] = frozenset()
    gradients: BucketedGradients = NO_GRADIENTS
    groups: Mapping[int, int] = field(default_factory=dict)
    loop_sums: Holds = NO_HOLDS
    routes: Routes = field(default_factory=dict)
    unfused_updates: Mapping[int, int] = field(default_factory=dict)
    written_once: frozenset[int] = frozenset()
    waits: tuple[EarlyUpdate, ...] = ()
    moved: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()
    repeated: frozenset[int] = frozenset()

    @property
    def buckets(self) -> Mapping[int, int]:
        """The bucket in which each sum that makes up a gradient is reduced."""
        return self.gradients.by_sum

    @property
    def grouped(self) -> Mapping[int, int]:
        """The groups of all sums that have one; those of gradients are reduced last."""
        first = max(self.buckets.values(), default=-1) + 1
        return {**self.buckets, **{value: first + number for value, number in self.groups.items()}} if self.groups else self.buckets

    def widening(self, value: int) -> int:
        """Returns 2 if partial results of a value are reduced in float32 instead of half as many bits, else 1."""
        return 2 if value in self.widened else 1

    @property
    def barriers(self) -> frozenset[int]:
        """The values behind which a barrier stands."""
        return self.written_once.union(self.unfused_updates.values())


def directives_of(assigned: Assigned, context: AutoParallelContext, *, has_regions: bool) -> Directives:
    """Returns the directives that a plan's price depends on; the price decides its waits, and `with_copies` adds the rest.

    Args:
        assigned: the step and its assignment.
        context: the options of the step.
        has_regions: whether any op is inside a `shard()` region.
    """
    graph, assignment, mesh = assigned.graph, assigned.assignment, assigned.mesh
    directives = _machine_directives(assigned)
    if mesh.num_devices == 1:
        return directives
    if asks_for_groups(context, mesh, has_regions=has_regions):
        gradients = bucketed_gradients(graph, context)
        groups = region_groups(graph, assignment, mesh, gradients.by_sum) if has_regions else {}
        directives = replace(directives, gradients=gradients, groups=groups)
    # Only TPU's compiler, which has such memory, was seen to keep both.
    if assigned.topology.compiler.scratch_bytes:
        directives = replace(directives, written_once=written_once(graph, assignment))
    return with_loop_sums(directives, graph, assignment, mesh)


def asks_for_groups(context: AutoParallelContext, mesh: LogicalMesh, *, has_regions: bool) -> bool:
    """Returns whether the context or a `shard()` region asks for gradients to be reduced in buckets."""
    return mesh.num_devices > 1 and (context.fuses_by_index or has_regions)


def priced_directives(assigned: Assigned) -> Directives:
    """Returns the directives that searches price: those that follow from the machine, and the sums of loops that wait for their end."""
    return with_loop_sums(_machine_directives(assigned), assigned.graph, assigned.assignment, assigned.mesh)


def _machine_directives(assigned: Assigned) -> Directives:
    """Returns the directives that follow from the machine, with every sum reduced where it is made."""
    graph, assignment, mesh, topology = assigned.graph, assigned.assignment, assigned.mesh, assigned.topology
    return Directives(
        all_to_all=topology.preferences.allows_all_to_all,
        widened=_widened(graph) if topology.preferences.widens_gradients else frozenset(),
        routes=shared_reads(graph, assigned.step.scopes, assignment, mesh, topology),
        unfused_updates=unfused_updates(graph, assignment, mesh, topology.compiler.scratch_bytes),
    )


def with_loop_sums(directives: Directives, graph: Graph, assignment: Assignment, mesh: LogicalMesh) -> Directives:
    """Returns directives with the sums that wait for the end of their loop."""
    return replace(directives, loop_sums=holds_of(graph, loop_sums(graph, directives.buckets), assignment, mesh))


def with_copies(directives: Directives, graph: Graph, scopes: Sequence[int], assignment: Assignment) -> Directives:
    """Returns directives with the values that lowering moves, computes again or repeats; no price depends on these."""
    recomputed = recomputed_values(graph, all_to_all=directives.all_to_all)
    moved = moved_values(graph.ops, assignment) | sliced_values(graph, scopes, assignment, recomputed, directives.routes.items())
    return replace(
        directives,
        moved=moved,
        recomputed=recomputed,
        repeated=repeated_values(graph, assignment, moved),
    )


def completed(directives: Directives, graph: Graph, scopes: Sequence[int], assignment: Assignment, mesh: LogicalMesh) -> Directives:
    """Returns directives with everything that follows from them and the assignment."""
    return with_copies(with_loop_sums(directives, graph, assignment, mesh), graph, scopes, assignment)


def _widened(graph: Graph) -> frozenset[int]:
    """Returns the low-precision sums that end in gradients, and in nothing that a matrix product reads."""
    adding = [op for op in ops_of(graph, WIDENED) if op.rule.combiner == "add"]
    found = [value for op in adding for value in op.results if graph.values[value].dtype in LOW]
    if not found:
        return frozenset()
    terminal = overlap_candidates(graph).terminal
    return frozenset(value for value in found if terminal[value])
