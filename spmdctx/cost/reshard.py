"""How a tensor gets from one sharding to another: the cheapest chain of steps that XLA does in one collective each.

A state is a sharding. Steps out of it, with `b` the bytes of one device's block and `n` the slices of the moved axes:

    slice               append an unused axis to a dimension, minor-most     moves nothing
    all_to_all          the minor-most axis of one dimension becomes another's   b (n - 1) / n
    collective_permute  other axes, or another order, with the same slices per dimension   b
    all_gather          drop minor-most axes of one dimension                b (n - 1)

The chain moves the fewest bytes (Dijkstra), and of those has the fewest steps. Only the dimensions that change, and how
the mesh divides them, matter for the chain, so it is found once per such pattern and then applied to every shape.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from spmdctx.cost.collectives import collective_time_s
from spmdctx.cost.topology import Topology
from spmdctx.ir import AxisNames, TensorSharding
from spmdctx.mesh import LogicalMesh, axes_of, local_shape


class ReshardStep(NamedTuple):
    """One step: a collective of `ir.COLLECTIVE_KINDS`, or the free "slice"; `sharding` is what it leaves behind.

    `payload_bytes` is counted as in `ir.Collective`, and is 0 for a slice.
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
    shape: tuple[int, ...], item_bytes: int, source: TensorSharding, target: TensorSharding, mesh: LogicalMesh
) -> tuple[ReshardStep, ...]:
    """The steps that turn `source` into `target` for a tensor of `shape`; none where they are equal."""
    changed = tuple(dim for dim in range(len(shape)) if source[dim] != target[dim])
    if not changed:
        return ()
    kept = frozenset(name for dim, axes in enumerate(source) if dim not in changed for name in axes)
    chain = _chain(
        tuple(source[dim] for dim in changed),
        tuple(target[dim] for dim in changed),
        tuple(math.gcd(shape[dim], mesh.num_devices) for dim in changed),
        kept,
        mesh,
    )
    steps: list[ReshardStep] = []
    current = source
    for kind, axes, state in chain:
        after = _with_dims(source, changed, state)
        payload = _payload_bytes(kind, shape, item_bytes, current, after, mesh)
        steps.append(ReshardStep(kind, axes, payload, after))
        current = after
    return tuple(steps)


@lru_cache(maxsize=1 << 16)
def reshard_time_s(
    shape: tuple[int, ...], item_bytes: int, source: TensorSharding, target: TensorSharding, mesh: LogicalMesh, topology: Topology
) -> float:
    """Seconds that the steps from `source` to `target` take one after the other."""
    return sum(
        collective_time_s(step.kind, step.payload_bytes, step.axes, mesh, topology)
        for step in reshard_steps(shape, item_bytes, source, target, mesh)
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
    held = after if kind == "all_gather" else before
    return math.prod(local_shape(shape, held, mesh)) * item_bytes


@lru_cache(maxsize=1 << 14)
def _chain(
    source: TensorSharding, target: TensorSharding, common: tuple[int, ...], kept: frozenset[str], mesh: LogicalMesh
) -> tuple[tuple[str, AxisNames, TensorSharding], ...]:
    """Dijkstra over shardings; `common` holds per dimension its greatest common divisor with the number of devices."""
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
    """Steps worth taking from `state` on the way to `target`."""
    # In units of the whole tensor over the number of devices, so that all prices are whole numbers.
    block = mesh.num_devices // mesh.num_slices(axes_of(state))
    used = frozenset(axes_of(state)) | kept
    for dim, names in enumerate(target):
        for name in names:
            if name not in used and _fits(dim, (*state[dim], name), target, common, mesh):
                yield _Move("slice", (name,), _put(state, dim, (*state[dim], name)), 0)
    for dim, names in enumerate(state):
        for start in range(len(names)):
            dropped = names[start:]
            yield _Move("all_gather", dropped, _put(state, dim, names[:start]), block * (mesh.num_slices(dropped) - 1))
    yield from _all_to_alls(state, target, common, mesh, block)
    yield from _permutes(state, target, used, mesh, block)


def _all_to_alls(state: TensorSharding, target: TensorSharding, common: tuple[int, ...], mesh: LogicalMesh, block: int) -> Iterator[_Move]:
    for dim, names in enumerate(state):
        if not names:
            continue
        last = names[-1]
        size = mesh.sizes[last]
        for other, wanted in enumerate(target):
            if other != dim and last in wanted and _fits(other, (*state[other], last), target, common, mesh):
                after = _put(_put(state, dim, names[:-1]), other, (*state[other], last))
                yield _Move("all_to_all", (last,), after, block * (size - 1) // size)


def _permutes(state: TensorSharding, target: TensorSharding, used: frozenset[str], mesh: LogicalMesh, block: int) -> Iterator[_Move]:
    """Axes that stay come first, in the target's order; what leaves comes last, movers before those to be gathered."""
    wanted = frozenset(axes_of(target))
    ordered = tuple(
        tuple(sorted(names, key=lambda name, goal=goal: (name not in goal, goal.index(name) if name in goal else name in wanted)))  # type: ignore[misc]
        for names, goal in zip(state, target, strict=True)
    )
    options = [ordered]
    if all(mesh.num_slices(names) == mesh.num_slices(goal) for names, goal in zip(state, target, strict=True)):
        options.append(target)
    for dim, goal in enumerate(target):
        others = used - frozenset(state[dim])
        if mesh.num_slices(goal) == mesh.num_slices(state[dim]) and not others.intersection(goal):
            options.append(_put(state, dim, goal))
    for after in options:
        if after != state:
            changed = tuple(dim for dim in range(len(state)) if state[dim] != after[dim])
            names = dict.fromkeys(name for dim in changed for name in (*state[dim], *after[dim]))
            yield _Move("collective_permute", tuple(name for name in mesh.names if name in names), after, block)


def _fits(dim: int, axes: AxisNames, target: TensorSharding, common: tuple[int, ...], mesh: LogicalMesh) -> bool:
    """Whether the dimension divides; the target itself is always allowed, padded if need be."""
    return common[dim] % mesh.num_slices(axes) == 0 or axes == target[dim][: len(axes)]


def _put(state: TensorSharding, dim: int, axes: AxisNames) -> TensorSharding:
    return (*state[:dim], axes, *state[dim + 1 :])
