"""The mesh of recursive_programming: one axis per round; then rounds that cut alike are joined into one axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames, TensorSharding

MOST_AXES = 3


def round_mesh(num_devices: int) -> LogicalMesh:
    """Returns a mesh of one axis per prime factor, the largest first, so that odd parts are dealt out while dimensions are still long."""
    primes, rest, divisor = [], num_devices, 2
    while rest > 1:
        if rest % divisor:
            divisor += 1
        else:
            primes.append(divisor)
            rest //= divisor
    return LogicalMesh.of(sorted(primes, reverse=True) or (1,))


def join_axes(mesh: LogicalMesh, uses: Iterable[tuple[AxisNames, float]], most: int = MOST_AXES) -> list[AxisNames]:
    """Returns groups of neighbouring axes that are used as one.

    Args:
        mesh: the mesh of the rounds.
        uses: axes that split a factor or a dimension, with the weight of the op; infinite for axes that must stay.
        most: the number of groups that is wanted. While there are more, joins that break uses are made, the lightest first.
    """
    broken = dict.fromkeys(pairwise(mesh.names), 0.0)
    for names, weight in uses:
        together = set(pairwise(names))
        for pair in broken:
            if pair not in together and not set(pair).isdisjoint(names):
                broken[pair] += weight
    joined = {pair for pair, weight in broken.items() if weight == 0.0}
    while len(mesh.names) - len(joined) > most:
        pair = min((pair for pair in broken if pair not in joined), key=lambda pair: broken[pair])
        if math.isinf(broken[pair]):
            break
        joined.add(pair)
    groups: list[AxisNames] = []
    for name in mesh.names:
        if groups and (groups[-1][-1], name) in joined:
            groups[-1] = (*groups[-1], name)
        else:
            groups.append((name,))
    return groups


def joined_mesh(mesh: LogicalMesh, groups: list[AxisNames]) -> LogicalMesh:
    """Returns a mesh with one axis per group, under the default names."""
    return LogicalMesh.of([mesh.num_slices(group) for group in groups])


def translate(names: AxisNames, groups: Mapping[str, tuple[str, AxisNames]]) -> AxisNames:
    """Returns the axes of the joined mesh for axes of the rounds; a group with a missing part splits nothing any more.

    Args:
        names: axes of one dimension or factor, in the order of the mesh.
        groups: per axis of the rounds, the joined axis and all of its parts.
    """
    found: list[str] = []
    position = 0
    while position < len(names):
        joined, parts = groups[names[position]]
        if names[position : position + len(parts)] != parts:
            break
        found.append(joined)
        position += len(parts)
    return tuple(found)


def translate_all(sharding: TensorSharding, groups: Mapping[str, tuple[str, AxisNames]]) -> TensorSharding:
    """Applies `translate` to each dimension or factor."""
    return tuple([translate(names, groups) for names in sharding])
