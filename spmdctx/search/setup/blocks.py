"""Meshes of many axes: the search uses some of their axes together, so that the shardings that it tries stay few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from spmdctx.ir.graph import Graph
from spmdctx.ir.mesh import Blocks, LogicalMesh
from spmdctx.ir.sharding import AxisNames
from spmdctx.search.setup.request import Setup

_FEW_AXES = 4
"""Axes that are never joined."""

_MOST_SHARDINGS = 500
"""Shardings of one tensor up to which more axes stay apart."""


def with_blocks(graph: Graph, setup: Setup) -> Setup:
    """Joins axes of a mesh with many into blocks, and notes it. Axes that the user's shardings use apart stay apart."""
    mesh = setup.mesh
    names = [name for name, size in mesh.axes if size > 1]
    rank = max((sum(size > 1 for size in value.shape) for value in graph.values), default=0)
    count = len(names)
    while count >= _FEW_AXES and (rank + 1) ** count > _MOST_SHARDINGS:
        count -= 1
    if len(names) <= _FEW_AXES or count >= len(names):
        return setup
    blocks = _blocks(mesh, names, _asked(setup), count)
    if len(blocks) == len(names):
        return setup
    own = Blocks(mesh.axes, tuple(blocks))
    note = f"The mesh has {len(names)} axes. The search used some of them only together: {joined_axes(own)}. "
    return replace(setup, mesh=own, notes=[*setup.notes, f"{note}Plans that use them apart were not tried."])


def joined_axes(mesh: LogicalMesh) -> str:
    """Returns the axes that a mesh has joined, as text: `a0·a1, a2·a3`; empty if there are none."""
    return ", ".join("·".join(block) for block in mesh.blocks if len(block) > 1) if isinstance(mesh, Blocks) else ""


def without_blocks(setup: Setup) -> Setup:
    """Returns a set-up with its mesh as it was before axes were joined."""
    return replace(setup, mesh=LogicalMesh(setup.mesh.axes)) if isinstance(setup.mesh, Blocks) else setup


def _blocks(mesh: LogicalMesh, names: list[str], asked: list[AxisNames], count: int) -> list[AxisNames]:
    """Joins neighbouring axes, those of the smallest size together first, until `count` blocks are left."""
    blocks: list[AxisNames] = [(name,) for name in names]
    while len(blocks) > count:
        pairs = [place for place in range(len(blocks) - 1) if not _apart(blocks[place] + blocks[place + 1], asked)]
        if not pairs:
            break
        place = min(pairs, key=lambda place: (mesh.num_slices(blocks[place] + blocks[place + 1]), place))
        blocks[place : place + 2] = [blocks[place] + blocks[place + 1]]
    return blocks


def _apart(block: AxisNames, asked: list[AxisNames]) -> bool:
    """Returns whether some sharding that is asked for uses a part of the axes, or all in another order."""
    for axes in asked:
        held = [place for place, name in enumerate(axes) if name in block]
        if held and axes[held[0] : held[0] + len(block)] != block:
            return True
    return False


def _asked(setup: Setup) -> list[AxisNames]:
    """Lists the axes of all dimensions and factors that are pinned."""
    every: list[Mapping[Any, object]] = [setup.pins, setup.seeds, setup.forced, setup.partial_pins, setup.parts]
    return list(dict.fromkeys(axes for own in every for axes in _axes(list(own.values()))))


def _axes(tree: object) -> Iterator[AxisNames]:
    """Yields all tuples of names."""
    if isinstance(tree, tuple) and tree and all(isinstance(name, str) for name in tree):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from _axes(part)
