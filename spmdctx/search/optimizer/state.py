"""The parallel optimizer: it splits optimizer state, and on request weights, over the devices that would hold copies of them (ZeRO).

A search has said how every parameter is split. The mesh axes that are left are the parameter's replicas. Its state takes the parameter's
sharding, with the replicas added to dimension 0 (dimension 1 of parameters stacked for a scan, whose dimension 0 counts layers).

Then only the update is planned again around the new state: gradients are reduce-scattered into it, and new weights are gathered from it.
With level 3 the weights are stored split too. Every op outside the update still takes them whole, so it gathers them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spmdctx.cost.step import Step
from spmdctx.ir.graph import Graph, Op, Role, Value, item_bytes
from spmdctx.ir.mesh import LogicalMesh, axes_of, divides, replicated
from spmdctx.ir.primitives import RENAMES
from spmdctx.ir.sharding import Assignment, AxisNames, TensorSharding
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.search.optimizer.gather_at_use import is_slice, keep_at_rest, readers_of
from spmdctx.search.optimizer.refined_mesh import refined, refined_assignment, refined_setup
from spmdctx.search.optimizer.update_region import plan_update
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


def split_optimizer(
    step: Step, setup: Setup, assignment: Assignment, asked: OptimizerSharding, topology: Topology, layerwise: frozenset[int]
) -> tuple[Setup, Assignment]:
    """Splits the optimizer state of a plan; the mesh is refined if `shard_size` cuts one of its axes.

    Args:
        step: the step.
        setup: the set-up of the search.
        assignment: the plan that the search found.
        asked: the split that the user asked for.
        topology: the machine.
        layerwise: parameters that have no replicas.
    """
    graph, size = step.graph, asked.shard_size
    splits, small = splits_of(graph, assignment.values, setup.mesh, asked, layerwise)
    inner = {} if size == ALL_REPLICAS else _inner_parts(splits, setup.mesh, size)
    mesh, parts = refined(setup.mesh, inner)
    setup, assignment = refined_setup(setup, mesh, parts), refined_assignment(assignment, parts)
    stored: dict[int, TensorSharding] = {}
    gradients: dict[int, TensorSharding] = {}
    unfit: list[Value] = []
    for one in splits:
        replicas = tuple([part for name in one.replicas for part in parts[name]])
        chosen = replicas if size == ALL_REPLICAS else _inner(replicas, mesh, size)
        target = _target(graph, assignment.values[one.parameter], mesh, one, chosen)
        if target is None:
            unfit.append(graph.values[one.parameter])
            continue
        base = assignment.values[one.parameter]
        # A split that the search has made itself stays.
        stored |= {value: target for value in one.values if assignment.values[value] == base or not any(assignment.values[value])}
        if asked.level >= GRADIENTS_TOO and _is_weight(graph, one.parameter):
            gradients[one.parameter] = target
    setup.notes += [*small_note(small, asked.threshold_bytes), *unfit_note(unfit, size)]
    if not stored and not gradients:
        return setup, assignment
    setup.pins.update(stored)
    setup.reasons.update(dict.fromkeys(stored, REASON))
    assignment, moved = keep_at_rest(graph, assignment, {value: stored[value] for value in stored if _is_weight(graph, value)}, setup)
    space = Space(graph, mesh, topology, step.from_literals)
    kept = frozenset(setup.forced) | moved
    return setup, plan_update(space, assignment, stored, gradients, kept, splits_accumulators=asked.splits_accumulators)


def scattered_gradients(graph: Graph, mesh: LogicalMesh, asked: OptimizerSharding, layerwise: frozenset[int]) -> dict[int, int]:
    """Returns the dimension along which a gradient may leave each device's loss in pieces, by parameter, if all inputs are whole."""
    whole = [replicated(len(value.shape)) for value in graph.values]
    splits, _ = splits_of(graph, whole, mesh, asked, layerwise)
    fitting = [one for one in splits if _is_weight(graph, one.parameter) and _target(graph, whole[one.parameter], mesh, one, one.replicas)]
    return {one.parameter: one.dim for one in fitting}


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Returns the bytes of a whole tensor."""
    return math.prod(shape) * item_bytes(dtype)


def _is_weight(graph: Graph, value: int) -> bool:
    return graph.values[value].role is Role.PARAMETER


def splits_of(
    graph: Graph, stored: Sequence[TensorSharding], mesh: LogicalMesh, asked: OptimizerSharding, layerwise: frozenset[int]
) -> tuple[list[StateSplit], list[Value]]:
    """Returns the parameters that have replicas, each with the values to split; and the parameters that are too small."""
    readers = readers_of(graph)
    found, small = [], []
    for parameter, state in _owners(graph).items():
        known = graph.values[parameter]
        weight = (parameter,) if asked.level >= WEIGHTS_TOO and _is_weight(graph, parameter) else ()
        values = tuple(dict.fromkeys((*weight, *state)))
        used = axes_of(stored[parameter])
        replicas = tuple([name for name, size in mesh.axes if size > 1 and name not in used])
        is_split = values or (asked.level >= GRADIENTS_TOO and _is_weight(graph, parameter))
        if not is_split or not known.shape or not replicas or parameter in layerwise:
            continue
        if math.prod(known.shape) == 1:
            continue
        if num_bytes(known.shape, known.dtype) < asked.threshold_bytes:
            small.append(known)
        else:
            found.append(StateSplit(parameter, values, _dim(graph, readers, parameter, dict(asked.layers)), replicas))
    return found, small


def _owners(graph: Graph) -> dict[int, list[int]]:
    """Returns the state of each parameter, by parameter in the order of the arguments.

    A state belongs to the parameter of its shape with the most similar path. Optimizer state that belongs to none owns itself.
    """
    inputs = [graph.values[value] for value in graph.inputs]
    owned: dict[int, list[int]] = {known.id: [] for known in inputs if known.role is Role.PARAMETER}
    by_shape: dict[tuple[int, ...], list[Value]] = {}
    for value in owned:
        by_shape.setdefault(graph.values[value].shape, []).append(graph.values[value])
    carried = {before for before, _ in graph.ties}
    terminal = overlap_candidates(graph).terminal
    for known in inputs:
        if known.role not in (Role.OPTIMIZER, Role.STATE) or not known.shape:
            continue
        alike = by_shape.get(known.shape, [])
        owner = max(alike, key=lambda other: _common(other.path, known.path), default=None)
        named = owner is not None and _common(owner.path, known.path) > 0
        is_copy = named and known.id in carried and bool(terminal[known.id])
        if owner is not None and (is_copy or (known.role is Role.OPTIMIZER and (named or len(alike) == 1))):
            owned[owner.id].append(known.id)
        elif known.role is Role.OPTIMIZER:
            owned[known.id] = [known.id]
    return owned


def _common(first: str, second: str) -> int:
    """Counts the names that two paths have in common at their ends."""
    count = 0
    for own, other in zip(reversed(first.split("/")), reversed(second.split("/")), strict=False):
        if own != other:
            break
        count += 1
    return count


def layer_dims(graph: Graph) -> list[int]:
    """Counts for each input its leading dimensions that count layers of scans."""
    readers = readers_of(graph)
    return [_dim(graph, readers, value, {}) for value in graph.inputs]


def _dim(graph: Graph, readers: Mapping[int, list[Op]], value: int, known: Mapping[int, int]) -> int:
    """Returns the first dimension that counts no layers of a scan; `known` holds the answers for values that go into shard_maps."""
    if value in known:
        return known[value]
    for op in readers.get(value, []):
        if is_slice(graph, op) and len(graph.values[value].shape) > 1:
            return 1 + _dim(graph, readers, op.results[0], known)
        if op.primitive in RENAMES and (deeper := _dim(graph, readers, op.results[0], known)):
            return deeper
    return 0


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


def small_note(small: Iterable[Value], threshold_bytes: int) -> list[str]:
    """Returns a note on the parameters below the threshold."""
    names = _names(small)
    limit = f"{threshold_bytes // 1024} KB (parallel_optimizer_threshold)"
    return [f"enable_parallel_optimizer leaves whole what holds less than {limit}: {names}."] if names else []


def unfit_note(unfit: Iterable[Value], size: int) -> list[str]:
    """Returns a note on the values that do not divide."""
    names = _names(unfit)
    how = "over its replicas" if size == ALL_REPLICAS else f"over {size} of its replicas (optimizer_weight_shard_size)"
    return [f"enable_parallel_optimizer leaves whole what does not divide {how}: {names}."] if names else []


def _names(values: Iterable[Value]) -> str:
    return ", ".join(f"'{known.path}' {list(known.shape)}" for known in values)
