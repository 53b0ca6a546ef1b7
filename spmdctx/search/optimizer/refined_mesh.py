"""The refinement of a mesh that cuts one of its axes in two, for state that is split over only a part of the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, AxisNames, OpSharding, TensorSharding
from spmdctx.search.setup.request import Setup

Parts = Mapping[str, AxisNames]
"""The axes of the new mesh for each axis of the old one, major first."""


def refined(mesh: LogicalMesh, inner: Mapping[str, int]) -> tuple[LogicalMesh, Parts]:
    """Cuts axes of a mesh in two, so that neighbors along an axis get an axis of their own.

    Args:
        mesh: the mesh.
        inner: the size of the minor part of each axis that is cut, which divides it.
    """
    axes: list[tuple[str, int]] = []
    parts: dict[str, AxisNames] = {}
    for name, size in mesh.axes:
        count = inner.get(name, size)
        if count in (1, size):
            axes.append((name, size))
            parts[name] = (name,)
            continue
        minor = _free_name(f"{name}_shard", mesh)
        axes += [(name, size // count), (minor, count)]
        parts[name] = (name, minor)
    return LogicalMesh(tuple(axes)), parts


def _free_name(name: str, mesh: LogicalMesh) -> str:
    while name in mesh.sizes:
        name += "_"
    return name


def refined_setup(setup: Setup, mesh: LogicalMesh, parts: Parts) -> Setup:
    """Translates a set-up to the refined mesh; every sharding splits what it did before."""
    if mesh == setup.mesh:
        return setup
    return replace(
        setup,
        mesh=mesh,
        parts=parts,
        pins=_of_each(setup.pins, parts),
        seeds=_of_each(setup.seeds, parts),
        forced=_of_each(setup.forced, parts),
        partial_pins={
            value: tuple(None if dim is None else _names(dim, parts) for dim in dims) for value, dims in setup.partial_pins.items()
        },
    )


def refined_assignment(assignment: Assignment, parts: Parts) -> Assignment:
    """Translates an assignment to the refined mesh."""
    if all(own == (name,) for name, own in parts.items()):
        return assignment
    known: dict[TensorSharding, TensorSharding] = {}
    ops: dict[TensorSharding, OpSharding] = {}
    for sharding in assignment.values:
        known.setdefault(sharding, _dims(sharding, parts))
    for op in assignment.ops:
        if op.axes not in ops:
            ops[op.axes] = OpSharding(_dims(op.axes, parts))
    return replace(assignment, ops=tuple([ops[op.axes] for op in assignment.ops]), values=tuple([known[own] for own in assignment.values]))


def refined_axes(axes: AxisNames, parts: Parts) -> AxisNames:
    """Translates axes of the old mesh to the new one; returns them unchanged if the mesh has not changed."""
    return _names(axes, parts) if parts else axes


def _of_each(shardings: Mapping[int, TensorSharding], parts: Parts) -> dict[int, TensorSharding]:
    return {key: _dims(sharding, parts) for key, sharding in shardings.items()}


def _dims(sharding: TensorSharding, parts: Parts) -> TensorSharding:
    return tuple([_names(names, parts) for names in sharding])


def _names(names: Sequence[str], parts: Parts) -> AxisNames:
    return tuple([part for name in names for part in parts[name]])
