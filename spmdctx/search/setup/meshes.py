"""The meshes that a search tries: every factorisation of the device count, with one mesh for all that cost the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from spmdctx.ir.collective import COLLECTIVE_KINDS
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.collectives import collective_price
from spmdctx.machine.topology import Topology

MAX_AXES = 3


def candidate_meshes(num_devices: int, topology: Topology, max_axes: int = MAX_AXES) -> list[LogicalMesh]:
    """Lists the ordered factorisations into at most `max_axes` axes, fewest axes first.

    Two orders of the same sizes on which every collective costs the same differ only in names; the ascending one is kept.
    """
    kept: dict[tuple[object, ...], LogicalMesh] = {}
    for count in range(1, max_axes + 1):
        for sizes in _factorisations(num_devices, count):
            mesh = LogicalMesh.of(sizes)
            kept.setdefault(_prices(mesh, topology), mesh)
    return list(kept.values())


def sizes_of(mesh: LogicalMesh) -> tuple[int, ...]:
    """Returns the sizes of a mesh's axes, sorted."""
    return tuple(sorted(mesh.shape))


def orders_of(mesh: LogicalMesh, meshes: Iterable[LogicalMesh]) -> list[LogicalMesh]:
    """Lists those of `meshes` whose axes have the sizes of a mesh, in any order."""
    return [other for other in meshes if sizes_of(other) == sizes_of(mesh)]


def narrow_and_even_first(mesh: LogicalMesh) -> tuple[int, int]:
    """Returns what sorts meshes by the number of their axes, then by the size of the largest."""
    return len(mesh.axes), max(mesh.shape)


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields the ordered factorisations in ascending lexicographic order, without factors of 1 (except for the number 1 itself)."""
    if count == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, count - 1):
                yield (first, *rest)


def _prices(mesh: LogicalMesh, topology: Topology) -> tuple[object, ...]:
    """Prices all collectives over all groups of axes, the axes taken by size."""
    by_size = sorted(mesh.names, key=lambda name: mesh.sizes[name])
    groups = [group for count in range(1, len(by_size) + 1) for group in combinations(by_size, count)]
    sizes = tuple(mesh.sizes[name] for name in by_size)
    return (sizes, *(collective_price(kind, group, mesh, topology) for group in groups for kind in COLLECTIVE_KINDS))
