"""Meshes of many axes: the search uses some of their axes together, so that the splits that it tries stay few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from spmdctx.ir.graph import Graph
from spmdctx.ir.mesh import Blocks, LogicalMesh, units
from spmdctx.ir.sharding import AxisNames
from spmdctx.search.setup.meshes import MAX_AXES
from spmdctx.search.setup.request import Setup

_FEW_AXES = MAX_AXES
"""Axes that are never joined."""

_MOST_TRIPLES = 3e9
"""Triples of splits, of all ops together, up to which more axes stay apart; a search then takes a second or two."""

_TOO_MANY_TRIPLES = 4 * _MOST_TRIPLES
"""The same, above which a mesh is not searched if the user's shardings keep its axes apart."""

_ALIKE = 40
"""The most ops of one rule that count: repeated layers are searched as one."""


def with_blocks(graph: Graph, setup: Setup) -> Setup:
    """Joins axes of a mesh with many into blocks, and notes it. Axes that the user's shardings use apart stay apart."""
    mesh = setup.mesh
    names = [name for name, size in mesh.axes if size > 1]
    if len(names) <= _FEW_AXES:
        return setup
    count = len(names)
    while count > 1 and _triples(graph, count) > _MOST_TRIPLES:
        count -= 1
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
    """Joins axes, those of the smallest size together first, until `count` blocks are left; neighbours as long as there are any to join."""
    blocks: list[AxisNames] = [(name,) for name in names]
    while len(blocks) > count:
        every = [(one, other) for one, other in combinations(range(len(blocks)), 2) if not _apart(blocks[one] + blocks[other], asked)]
        pairs = [(one, other) for one, other in every if other == one + 1] or every
        if not pairs:
            break
        one, other = min(pairs, key=lambda pair: (mesh.num_slices(blocks[pair[0]] + blocks[pair[1]]), pair))
        blocks[one] += blocks.pop(other)
    return blocks


def is_too_wide(graph: Graph, setup: Setup) -> bool:
    """Returns whether a mesh has so many axes, also where some are joined, that a search of its splits would hardly end."""
    apart = [unit for unit in units(setup.mesh) if setup.mesh.num_slices(unit) > 1]
    return len(apart) > _FEW_AXES and _triples(graph, len(apart)) > _TOO_MANY_TRIPLES


def _triples(graph: Graph, num_axes: int) -> float:
    """Counts the triples of splits of each op, its own and those of two neighbours; each axis splits one of its factors, or none."""
    rules = {id(op.rule): op.rule for op in graph.ops}
    alike = Counter(id(op.rule) for op in graph.ops)
    return sum(min(_ALIKE, alike[key]) * (1.0 + sum(rule.splittable)) ** (3 * num_axes) for key, rule in rules.items())


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
