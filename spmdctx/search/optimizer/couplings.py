"""The parallel optimizer as part of a search: the tensors that must be split like their parameter, and further, however it is split.

    state(p)      is stored as p is, with all axes that p does not use added to one dimension of it (level 1 and 2)
    p             is stored as something with all other axes added to it; its state is stored alike (level 3)
    sums(p)       of micro-batches: split like the state where accumulators are, else no further than p is

A tensor that does not divide so stays as the parameter is. Gradients that no loop sums up are in no pair. A search that keeps to these
pairs finds the cheapest plan of all that the options allow, and its bound holds for all of these.
"""

from __future__ import annotations

from collections.abc import Iterable

from spmdctx.ir.analysis.gradient_order import gradient_order
from spmdctx.ir.analysis.loop_sums import loop_sums
from spmdctx.ir.graph import Graph
from spmdctx.ir.mesh import LogicalMesh, replicated
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.search.optimizer.owners import is_weight
from spmdctx.search.optimizer.state import REASON, WEIGHTS_TOO, StateSplit, splits_of
from spmdctx.search.optimizer.whole import whole_notes
from spmdctx.search.setup.request import ALL_REPLICAS, Coupling, OptimizerSharding, Setup


def couplings(graph: Graph, num_devices: int, asked: OptimizerSharding, layerwise: frozenset[int]) -> tuple[Coupling, ...]:
    """Returns the pairs that a search must keep to.

    There are none if only a part of the replicas shares a copy, for which the mesh is refined later.
    """
    if asked.shard_size != ALL_REPLICAS or num_devices == 1:
        return ()
    whole = [replicated(len(value.shape)) for value in graph.values]
    splits, _ = splits_of(graph, whole, LogicalMesh.of({"replicas": num_devices}), asked, layerwise)
    found = []
    for one in splits:
        itself = asked.level >= WEIGHTS_TOO and is_weight(graph.values[one.parameter])
        for value in one.values:
            how = "itself" if value == one.parameter else "alike" if itself else "further"
            found.append(Coupling(one.parameter, value, one.dim, how))
    sums = _accumulators(graph, splits)
    for one in splits:
        for value in sums.get(one.parameter, ()):
            itself = asked.level >= WEIGHTS_TOO
            how = ("alike" if itself else "further") if asked.splits_accumulators else "within"
            if not (itself and how == "within"):
                found.append(Coupling(one.parameter, value, one.dim, how))
    return tuple(found)


def _accumulators(graph: Graph, splits: Iterable[StateSplit]) -> dict[int, list[int]]:
    """Finds for each parameter the sums of its gradients over micro-batches, which have its shape."""
    sums = loop_sums(graph)
    if not sums:
        return {}
    terms = {gradient.path: frozenset(gradient.sums) for gradient in gradient_order(graph)}
    found: dict[int, list[int]] = {}
    for one in splits:
        known = graph.values[one.parameter]
        own = terms.get(known.path, frozenset())
        totals = [sum_.total for sum_ in sums if not own.isdisjoint(sum_.terms) and graph.values[sum_.total].shape == known.shape]
        if totals:
            found[one.parameter] = totals
    return found


def name_what_is_split(
    graph: Graph, setup: Setup, assignment: Assignment, num_devices: int, asked: OptimizerSharding, layerwise: frozenset[int]
) -> None:
    """Adds to the set-up which inputs the parallel optimizer has split, and notes on those that it has left whole."""
    stored, inputs = assignment.values, frozenset(graph.inputs)
    whole = [replicated(len(value.shape)) for value in graph.values]
    _, small = splits_of(graph, whole, LogicalMesh.of({"replicas": num_devices}), asked, layerwise)
    unfit: dict[int, int | None] = {}
    for coupling in setup.couplings:
        if coupling.value not in inputs:
            continue
        if _uses_all(stored[coupling.value], setup.mesh):
            setup.pins[coupling.value] = stored[coupling.value]
            setup.reasons[coupling.value] = REASON
        else:
            unfit[coupling.value] = coupling.dim
    split = [value for value in graph.inputs if any(stored[value])]
    setup.notes += whole_notes(graph, asked, small, unfit, split)


def _uses_all(sharding: TensorSharding, mesh: LogicalMesh) -> bool:
    """Returns whether a sharding uses the whole mesh."""
    return mesh.num_slices([name for names in sharding for name in names]) == mesh.num_devices
