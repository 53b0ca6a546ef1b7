"""Finds the cheapest chain of steps from one sharding of a tensor to another; XLA does each step in one collective.

On meshes of up to three axes the chain is read from `reshard_table`, which lists the steps and what they move. On larger meshes,
and where a dimension has to be padded, Dijkstra's algorithm searches the steps that lead towards the target. Only the dimensions
that change, and how the mesh divides them, matter. So each such pattern is searched once and its chain applied to every shape.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from spmdctx.ir.domain import MAX_ORDERED_AXES, domain
from spmdctx.ir.mesh import LogicalMesh, axes_of, moved_axes
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.reshard_table import chain
from spmdctx.machine.topology import Topology


class ReshardStep(NamedTuple):
    """One step: a collective of `ir.collective.COLLECTIVE_KINDS`, or the free "slice"; `sharding` is what it leaves behind.

    `payload_bytes` is counted as in `ir.collective.Collective`, and is 0 for a slice.
    """

    kind: str
    axes: AxisNames
    payload_bytes: int
    sharding: TensorSharding


class _Move(NamedTuple):
    kind: str
    axes: AxisNames
    state: TensorSharding
    moved: int


@lru_cache(maxsize=1 << 16)
def reshard_steps(
    shape: tuple[int, ...],
    item_bytes: int,
    source: TensorSharding,
    target: TensorSharding,
    mesh: LogicalMesh,
    all_to_all: bool = True,
) -> tuple[ReshardStep, ...]:
    """Returns the steps that turn `source` into `target` for a tensor of `shape`; none if they are equal.

    Without `all_to_all` no step is an all_to_all: the tensor is gathered and sliced.
    """
    if source == target:
        return ()
    if 1 in mesh.sizes.values():
        return _without_single_axes(shape, item_bytes, source, target, mesh, all_to_all)
    tabled = _tabled_steps(shape, item_bytes, source, target, mesh, all_to_all)
    if tabled is not None:
        return tabled
    changed = tuple(dim for dim in range(len(shape)) if source[dim] != target[dim])
    kept = frozenset(name for dim, axes in enumerate(source) if dim not in changed for name in axes)
    found = _chain(
        tuple(source[dim] for dim in changed),
        tuple(target[dim] for dim in changed),
        tuple(math.gcd(shape[dim], mesh.num_devices) for dim in changed),
        kept,
        mesh,
        all_to_all,
    )
    whole = tuple((kind, axes, _with_dims(source, changed, state)) for kind, axes, state in found)
    return _with_payloads(shape, item_bytes, source, whole, mesh)


def _tabled_steps(
    shape: tuple[int, ...], item_bytes: int, source: TensorSharding, target: TensorSharding, mesh: LogicalMesh, all_to_all: bool
) -> tuple[ReshardStep, ...] | None:
    """Returns the steps of `reshard_table`, None if the mesh is too large for it or a dimension is padded."""
    if len(mesh.axes) > MAX_ORDERED_AXES:
        return None
    known = domain(mesh, shape)
    first, last = known.number(source), known.number(target)
    if first < 0 or last < 0:
        return None
    path: list[_Move] = []
    for hop in chain(known, first, last, all_to_all):
        path.append(_Move(hop.kind, hop.axes, known.shardings[hop.after], 0))
    return _with_payloads(shape, item_bytes, source, _merge_slices(path), mesh)


def _with_payloads(
    shape: tuple[int, ...],
    item_bytes: int,
    source: TensorSharding,
    path: tuple[tuple[str, AxisNames, TensorSharding], ...],
    mesh: LogicalMesh,
) -> tuple[ReshardStep, ...]:
    steps: list[ReshardStep] = []
    for kind, axes, after in path:
        payload = _payload_bytes(kind, shape, item_bytes, source, after, mesh)
        steps.append(ReshardStep(kind, axes, payload, after))
        source = after
    return tuple(steps)


def _without_single_axes(
    shape: tuple[int, ...], item_bytes: int, source: TensorSharding, target: TensorSharding, mesh: LogicalMesh, all_to_all: bool
) -> tuple[ReshardStep, ...]:
    """Finds the steps on the mesh without its axes of size 1, which split nothing; a free step sets the names right."""
    smaller = LogicalMesh(tuple((name, size) for name, size in mesh.axes if size > 1))
    ends = [tuple(tuple(name for name in names if name in smaller.sizes) for names in end) for end in (source, target)]
    steps = reshard_steps(shape, item_bytes, ends[0], ends[1], smaller, all_to_all)
    return steps if ends[1] == target and steps else (*steps, ReshardStep("slice", (), 0, target))


@lru_cache(maxsize=1 << 16)
def reshard_time_s(
    shape: tuple[int, ...], item_bytes: int, source: TensorSharding, target: TensorSharding, mesh: LogicalMesh, topology: Topology
) -> float:
    """Returns the seconds that the steps from `source` to `target` take one after the other."""
    return sum(
        collective_time_s(step.kind, step.payload_bytes, step.axes, mesh, topology)
        for step in reshard_steps(shape, item_bytes, source, target, mesh, topology.preferences.allows_all_to_all)
        if step.kind != "slice"
    )


def _with_dims(sharding: TensorSharding, dims: tuple[int, ...], axes: TensorSharding) -> TensorSharding:
    replaced = list(sharding)
    for dim, names in zip(dims, axes, strict=True):
        replaced[dim] = names
    return tuple(replaced)


def _payload_bytes(
    kind: str, shape: tuple[int, ...], item_bytes: int, before: TensorSharding, after: TensorSharding, mesh: LogicalMesh
) -> int:
    if kind == "slice":
        return 0
    sizes = []
    for size, held, kept in zip(shape, before, after, strict=True):
        # XLA pads a dimension that does not divide, and moves the padding too.
        slices = math.lcm(mesh.num_slices(held), mesh.num_slices(kept))
        sizes.append(-(-size // slices) * slices)
    num_slices = mesh.num_slices(axes_of(after if kind == "all_gather" else before))
    return math.prod(sizes) * item_bytes // num_slices


@lru_cache(maxsize=1 << 14)
def _chain(
    source: TensorSharding, target: TensorSharding, common: tuple[int, ...], kept: frozenset[str], mesh: LogicalMesh, all_to_all: bool
) -> tuple[tuple[str, AxisNames, TensorSharding], ...]:
    """Searches the shardings by Dijkstra's algorithm; `common` is the greatest common divisor of each dimension and the devices."""
    best: dict[TensorSharding, tuple[int, int]] = {source: (0, 0)}
    came: dict[TensorSharding, tuple[TensorSharding, _Move]] = {}
    queue: list[tuple[int, int, TensorSharding]] = [(0, 0, source)]
    while queue:
        moved, count, state = heapq.heappop(queue)
        if state == target:
            break
        if best[state] < (moved, count):
            continue
        for move in _moves(state, target, common, kept, mesh):
            if move.kind == "all_to_all" and not all_to_all:
                continue
            price = (moved + move.moved, count + 1)
            if price < best.get(move.state, (math.inf, 0)):
                best[move.state] = price
                came[move.state] = (state, move)
                heapq.heappush(queue, (*price, move.state))
    path: list[_Move] = []
    state = target
    while state != source:
        state, move = came[state]
        path.append(move)
    return _merge_slices(path[::-1])


def _merge_slices(path: list[_Move]) -> tuple[tuple[str, AxisNames, TensorSharding], ...]:
    merged: list[tuple[str, AxisNames, TensorSharding]] = []
    for kind, axes, state, _ in path:
        if kind == "slice" and merged and merged[-1][0] == "slice":
            axes = merged.pop()[1] + axes
        merged.append((kind, axes, state))
    return tuple(merged)


def _moves(
    state: TensorSharding, target: TensorSharding, common: tuple[int, ...], kept: frozenset[str], mesh: LogicalMesh
) -> Iterator[_Move]:
    """Yields the steps worth taking from `state` on the way to `target`."""
    # In units of the whole tensor over the number of devices, so that all prices are whole numbers.
    block = mesh.num_devices // mesh.num_slices(axes_of(state))
    used = frozenset(axes_of(state)) | kept
    padded = tuple(common[dim] % mesh.num_slices(names) != 0 for dim, names in enumerate(state))
    for dim, names in enumerate(target):
        # Axis by axis, so that a later step may come between; a padded dimension is split at once.
        steps = [(name,) for name in names] if common[dim] % mesh.num_slices(names) == 0 else [names]
        for added in steps:
            if used.isdisjoint(added) and _fits(dim, state[dim], added, target, common, mesh):
                yield _Move("slice", added, _put(state, dim, (*state[dim], *added)), 0)
    yield from _slices_before_all_to_alls(state, target, common, used, mesh)
    for dim, names in enumerate(state):
        for start in range(min(1, len(names)) if padded[dim] else len(names)):
            dropped = names[start:]
            yield _Move("all_gather", dropped, _put(state, dim, names[:start]), block * (mesh.num_slices(dropped) - 1))
    yield from _all_to_alls(state, target, common, padded, mesh, block)
    if not any(padded):
        yield from _permutes(state, target, used, mesh, block)


def _slices_before_all_to_alls(
    state: TensorSharding, target: TensorSharding, common: tuple[int, ...], used: frozenset[str], mesh: LogicalMesh
) -> Iterator[_Move]:
    """Yields slices by which an unused axis joins the axis that it follows in the target, so that one all_to_all moves both."""
    for dim, names in enumerate(state):
        for goal in target if names else ():
            if names[-1] in goal[:-1]:
                added = goal[goal.index(names[-1]) + 1]
                if added not in used and common[dim] % mesh.num_slices((*names, added)) == 0:
                    yield _Move("slice", (added,), _put(state, dim, (*names, added)), 0)


def _all_to_alls(
    state: TensorSharding, target: TensorSharding, common: tuple[int, ...], padded: tuple[bool, ...], mesh: LogicalMesh, block: int
) -> Iterator[_Move]:
    for dim, names in enumerate(state):
        for start in range(min(1, len(names)) if padded[dim] else len(names)):
            leaving = names[start:]
            size = mesh.num_slices(leaving)
            for other, wanted in enumerate(target):
                if other != dim and set(leaving) <= set(wanted) and _fits(other, state[other], leaving, target, common, mesh):
                    after = _put(_put(state, dim, names[:start]), other, (*state[other], *leaving))
                    yield _Move("all_to_all", leaving, after, block * (size - 1) // size)


def _permutes(state: TensorSharding, target: TensorSharding, used: frozenset[str], mesh: LogicalMesh, block: int) -> Iterator[_Move]:
    options = [tuple(_order(names, goal, target) for names, goal in zip(state, target, strict=True))]
    if all(mesh.num_slices(names) == mesh.num_slices(goal) for names, goal in zip(state, target, strict=True)):
        options.append(target)
    for dim, goal in enumerate(target):
        others = used - frozenset(state[dim])
        if mesh.num_slices(goal) == mesh.num_slices(state[dim]) and others.isdisjoint(goal):
            options.append(_put(state, dim, goal))
    for after in options:
        if after != state:
            names = frozenset[str]().union(*(moved_axes(own, new, mesh) for own, new in zip(state, after, strict=True)))
            yield _Move("collective_permute", tuple(name for name in mesh.names if name in names), after, block)


def _order(names: AxisNames, goal: AxisNames, target: TensorSharding) -> AxisNames:
    """Orders axes: first those that stay, in the goal's order, then those to be gathered, last those that move elsewhere."""
    staying = tuple(name for name in goal if name in names)
    moving = frozenset(axes_of(target))
    leaving = [name for name in names if name not in goal]
    return staying + tuple(sorted(leaving, key=lambda name: name in moving))


def _fits(dim: int, held: AxisNames, added: AxisNames, target: TensorSharding, common: tuple[int, ...], mesh: LogicalMesh) -> bool:
    """Returns whether the dimension divides with `added`; one that must be padded may only go from whole to its target at once."""
    if common[dim] % mesh.num_slices((*held, *added)) == 0:
        return True
    return not held and added == target[dim]


def _put(state: TensorSharding, dim: int, axes: AxisNames) -> TensorSharding:
    return (*state[:dim], axes, *state[dim + 1 :])
