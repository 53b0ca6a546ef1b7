"""The parallel optimizer: it splits optimizer state, and on request weights, over the devices that would hold copies of them (ZeRO).

A search has said how every parameter is split. The mesh axes that are left are the parameter's replicas. Its state takes the parameter's
sharding, with the replicas added to dimension 0 (dimension 1 of parameters stacked for a scan, whose dimension 0 counts layers).

Then only the update is planned again around the new state: gradients are reduce-scattered into it, and new weights are gathered from it.
With level 3 the weights are stored split too. Every op outside the update still takes them whole, so it gathers them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from spmdctx.cost.step import Step, bill_of
from spmdctx.ir.graph import Graph, Role, Value
from spmdctx.ir.mesh import LogicalMesh, axes_of, divides, replicated
from spmdctx.ir.sharding import Assignment, AxisNames, TensorSharding
from spmdctx.machine.topology import Topology
from spmdctx.search.optimizer.gather_at_use import keep_at_rest, layer_dim, readers_of
from spmdctx.search.optimizer.owners import is_weight, owners
from spmdctx.search.optimizer.refined_mesh import refined, refined_assignment, refined_setup
from spmdctx.search.optimizer.update_region import multiplied_state, plan_update
from spmdctx.search.optimizer.whole import whole_notes
from spmdctx.search.problem.space import Space
from spmdctx.search.setup.request import ALL_REPLICAS, OptimizerSharding, Setup

GRADIENTS_TOO, WEIGHTS_TOO = 2, 3
REASON = "enable_parallel_optimizer splits it over the replicas"


class StateSplit(NamedTuple):
    """A parameter, the input values that are split like it (with level 3 itself too), the dimension that is split, and its replicas."""

    parameter: int
    values: tuple[int, ...]
    dim: int
    replicas: AxisNames

    @property
    def leaves(self) -> tuple[int, ...]:
        """The inputs that stay whole if there is no such split."""
        return tuple(dict.fromkeys((self.parameter, *self.values)))


def split_optimizer(
    step: Step, setup: Setup, assignment: Assignment, asked: OptimizerSharding, topology: Topology, layerwise: frozenset[int]
) -> tuple[Setup, Assignment]:
    """Splits the optimizer state of a plan; the mesh is refined if `shard_size` cuts one of its axes.

    An optimizer that multiplies matrices may split its products too, and the state of stacked parameters along the stack: if the step
    is faster so.

    Args:
        step: the step.
        setup: the set-up of the search.
        assignment: the plan that the search found.
        asked: the split that the user asked for.
        topology: the machine.
        layerwise: parameters that have no replicas.
    """
    multiplied = multiplied_state(step.graph, asked.differentiated, setup.mesh)
    ways = []
    for stacked in (frozenset[int](), multiplied) if multiplied else (multiplied,):
        own = replace(setup, pins=dict(setup.pins), reasons=dict(setup.reasons), notes=list(setup.notes))
        ways.append(_split(step, own, assignment, asked, topology, layerwise, stacked))
    if len(ways) == 1:
        return ways[0]
    seconds = [_seconds(step, way[1], way[0].mesh, topology) for way in ways]
    return ways[seconds.index(min(seconds))]


def _seconds(step: Step, assignment: Assignment, mesh: LogicalMesh, topology: Topology) -> float:
    return bill_of(step, assignment, mesh, topology).total_s


def _split(
    step: Step,
    setup: Setup,
    assignment: Assignment,
    asked: OptimizerSharding,
    topology: Topology,
    layerwise: frozenset[int],
    multiplied: frozenset[int],
) -> tuple[Setup, Assignment]:
    """Splits the state; that of stacked parameters along the stack if it is `multiplied`, as the products of its update then are."""
    graph, size = step.graph, asked.shard_size
    splits, small = splits_of(graph, assignment.values, setup.mesh, asked, layerwise, multiplied)
    inner = {} if size == ALL_REPLICAS else _inner_parts(splits, setup.mesh, size)
    mesh, parts = refined(setup.mesh, inner)
    setup, assignment = refined_setup(setup, mesh, parts), refined_assignment(assignment, parts)
    stored: dict[int, TensorSharding] = {}
    gradients: dict[int, TensorSharding] = {}
    unfit: dict[int, int | None] = {}
    for one in splits:
        replicas = tuple([part for name in one.replicas for part in parts[name]])
        chosen = replicas if size == ALL_REPLICAS else _inner(replicas, mesh, size)
        target = _target(graph, assignment.values[one.parameter], mesh, one, chosen)
        if target is None:
            unfit |= dict.fromkeys(one.leaves, one.dim if chosen else None)
            continue
        base = assignment.values[one.parameter]
        # A split that the search has made itself stays.
        stored |= {value: target for value in one.values if assignment.values[value] == base or not any(assignment.values[value])}
        if asked.level >= GRADIENTS_TOO and _has_gradient(graph, one.parameter):
            gradients[one.parameter] = target
    split = [value for value in graph.inputs if value in stored or any(assignment.values[value])]
    setup.notes += whole_notes(graph, asked, small, unfit, split)
    if not stored and not gradients:
        return setup, assignment
    setup.pins.update(stored)
    setup.reasons.update(dict.fromkeys(stored, REASON))
    weights = {value: stored.pop(value) for value in list(stored) if is_weight(graph.values[value])} if multiplied else {}
    space, kept = Space(graph, mesh, topology, step.from_literals), frozenset(setup.forced)
    replanned = partial(plan_update, space, splits_accumulators=asked.splits_accumulators)
    if not stored and not gradients:
        stored = weights
    elif multiplied:
        # Weights that are stored in another way must not decide how the products of their update are split.
        assignment = replanned(assignment, stored, gradients, kept, differentiated=asked.differentiated)
        touching = {op for value in weights for op in space.neighbours[space.slot_of[value]]}
        stored, gradients, kept = weights, {}, kept | ({op.id for op in graph.ops} - touching)
    at_rest = {value: stored[value] for value in stored if is_weight(graph.values[value])}
    assignment, moved = keep_at_rest(graph, assignment, at_rest, setup)
    return setup, replanned(assignment, stored, gradients, kept | moved)


def scattered_gradients(graph: Graph, mesh: LogicalMesh, asked: OptimizerSharding, layerwise: frozenset[int]) -> dict[int, int]:
    """Returns the dimension along which a gradient may leave each device's loss in pieces, by parameter, if all inputs are whole."""
    whole = [replicated(len(value.shape)) for value in graph.values]
    splits, _ = splits_of(graph, whole, mesh, asked, layerwise)
    fitting = [
        one for one in splits if _has_gradient(graph, one.parameter) and _target(graph, whole[one.parameter], mesh, one, one.replicas)
    ]
    return {one.parameter: one.dim for one in fitting}


def _has_gradient(graph: Graph, value: int) -> bool:
    return graph.values[value].role is Role.PARAMETER


def splits_of(
    graph: Graph,
    stored: Sequence[TensorSharding],
    mesh: LogicalMesh,
    asked: OptimizerSharding,
    layerwise: frozenset[int],
    multiplied: frozenset[int] = frozenset(),
) -> tuple[list[StateSplit], list[int]]:
    """Returns the parameters that have replicas, each with the values to split; and the values that are too small.

    State that is `multiplied` is split along the stack of its parameter, if that divides.
    """
    readers, layers = readers_of(graph), dict(asked.layers)
    found, small = [], list[int]()
    for parameter, state in owners(graph).items():
        known = graph.values[parameter]
        weight = (parameter,) if asked.level >= WEIGHTS_TOO and is_weight(known) else ()
        used = axes_of(stored[parameter])
        replicas = tuple([name for name, size in mesh.axes if size > 1 and name not in used])
        is_split = weight or state or (asked.level >= GRADIENTS_TOO and _has_gradient(graph, parameter))
        if not is_split or not known.shape or not replicas or parameter in layerwise or math.prod(known.shape) <= 1:
            continue
        one = StateSplit(parameter, tuple(dict.fromkeys((*weight, *state))), 0, replicas)
        if known.num_bytes < asked.threshold_bytes:
            small += one.leaves
            continue
        fitting = _fitting_dims(known, stored[parameter], mesh, one, asked.shard_size)
        dim = layers.get(parameter) or layer_dim(graph, readers, parameter)
        if not _has_gradient(graph, parameter) and dim not in fitting:
            dim = next(iter(fitting), dim)
        one = one._replace(dim=dim)
        stack = next((own for own in fitting if own < dim), dim)
        if stack != dim and not multiplied.isdisjoint(state):
            found += [one._replace(values=weight)] if weight else []
            one = one._replace(values=tuple(state), dim=stack)
        found.append(one)
    return found, small


def _fitting_dims(known: Value, stored: TensorSharding, mesh: LogicalMesh, one: StateSplit, size: int) -> list[int]:
    """Returns the dimensions of a value that divide over its replicas, or over `size` of them."""
    count = mesh.num_slices(one.replicas) if size == ALL_REPLICAS else size
    return [dim for dim, names in enumerate(stored) if known.shape[dim] % (mesh.num_slices(names) * count) == 0 < known.shape[dim]]


def layer_dims(graph: Graph) -> list[int]:
    """Counts for each input its leading dimensions that count layers of scans."""
    readers = readers_of(graph)
    return [layer_dim(graph, readers, value) for value in graph.inputs]


def _inner_parts(splits: Iterable[StateSplit], mesh: LogicalMesh, size: int) -> dict[str, int]:
    """Returns the minor part of each axis that groups of `size` neighbouring replicas cut; the first parameter decides."""
    inner: dict[str, int] = {}
    for one in splits:
        rest = size
        for name in reversed(one.replicas):
            if rest % mesh.sizes[name]:
                if mesh.sizes[name] % rest == 0:
                    inner.setdefault(name, rest)
                break
            rest //= mesh.sizes[name]
    return inner


def _inner(replicas: AxisNames, mesh: LogicalMesh, size: int) -> AxisNames:
    """Returns the last of some axes whose product is `size`; none if there are no such axes."""
    for start in range(len(replicas)):
        if mesh.num_slices(replicas[start:]) == size:
            return replicas[start:]
    return ()


def _target(graph: Graph, base: TensorSharding, mesh: LogicalMesh, one: StateSplit, chosen: AxisNames) -> TensorSharding | None:
    """Returns the parameter's sharding with the chosen replicas added; None if there are none, or they do not divide it."""
    target = (*base[: one.dim], base[one.dim] + chosen, *base[one.dim + 1 :])
    return target if chosen and divides(graph.values[one.parameter].shape, target, mesh) else None
