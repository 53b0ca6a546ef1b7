"""Finds the mesh axes of a compiled collective from its replica groups or source-target pairs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import IntArray
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames

_GROUPS = re.compile(r"replica_groups=(\{\{[^}]*\}(?:,\{[^}]*\})*\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\{[^}]*\})")
_PAIRS = re.compile(r"source_target_pairs=\{(\{\d+,\d+\}(?:,\{\d+,\d+\})*)?\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:,\s*device_ids=\((.*?)\)(?=\s*\{))?\s*\{([^}]*)\}")
_MESH_AXIS = re.compile(r"['\"]?([^'\",=\s]+)['\"]?=(\d+)")
_AXIS_REF = re.compile(r"['\"]?([^'\",:\s]+)['\"]?(?::\((\d+)\)(\d+))?")


class Span(NamedTuple):
    """Mesh axes of a collective, in mesh order, and the number of devices per group.

    `note` is set where the groups are not all devices along those axes: a part of an axis, say.
    """

    axes: AxisNames
    group_size: int
    note: str = ""


def read_span(attributes: str, mesh: LogicalMesh) -> Span:
    """Returns the span of a collective with these attributes; groups of one device have no axes."""
    pairs = _PAIRS.search(attributes)
    if pairs is not None:
        return _span_of_pairs(_ints(pairs.group(1) or ""), mesh)
    groups = read_groups(attributes, mesh.num_devices)
    coordinates = _coordinates(groups, mesh)
    varying = (coordinates != coordinates[:, :1]).any(axis=(0, 1))
    axes = tuple(name for name, varies in zip(mesh.names, varying, strict=True) if varies)
    size = groups.shape[1]
    note = "" if size == mesh.num_slices(axes) else f"groups of {size} within {'+'.join(axes)}"
    return Span(axes, size, note)


def read_groups(attributes: str, num_devices: int) -> IntArray:
    """Returns device groups, one row each, from any of the three syntaxes; no groups, or an empty list, means all devices."""
    found = _GROUPS.search(attributes)
    text = found.group(1) if found else "{}"
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        shape = _ints(text[: text.index("]")])
        return _iota(text[text.index("<=") + 2 :]).reshape(shape)
    if text == "{}":
        return np.arange(num_devices).reshape(1, -1)
    rows = [_ints(row) for row in re.findall(r"\{([\d,]*)\}", text[1:-1])]
    # Devices that the user's group leaves out stand alone and send nothing.
    together = rows if len({len(row) for row in rows}) == 1 else [row for row in rows if len(row) > 1]
    return np.array(together, dtype=np.int64)


def _mesh_groups(text: str) -> IntArray:
    """Reads groups along the named axes of a mesh, or along parts `'b':(2)2` of them.

    The syntax is `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`.
    """
    found = _MESH.match(text)
    if found is None:
        raise ValueError(f"Replica groups of an unknown form: {text}")
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(found.group(1))}
    total = math.prod(sizes.values())
    order = found.group(2)
    ids = np.arange(total) if not order else _iota(order) if order.startswith("[") else np.array(_ints(order), dtype=np.int64)
    refs = {name: (int(before or 1), int(size) if size else sizes[name]) for name, before, size in _AXIS_REF.findall(found.group(3))}
    pieces: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        before, own = refs.get(name, (1, 1))
        grouped += [len(pieces) + 1] if name in refs else []
        pieces += [before, own, size // (before * own)]
    kept = [index for index in range(len(pieces)) if index not in grouped]
    group_size = math.prod(pieces[index] for index in grouped)
    return ids.reshape(pieces).transpose(kept + grouped).reshape(-1, group_size)


def _iota(text: str) -> IntArray:
    """Reads `[2,4]T(1,0)`: the numbers from 0 in that shape, transposed and flattened."""
    found = _IOTA.match(text)
    if found is None:
        raise ValueError(f"A device list of an unknown form: {text}")
    shape = _ints(found.group(2) or found.group(1))
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(_ints(found.group(3))) if found.group(3) else ids).reshape(-1)


def _span_of_pairs(flat: list[int], mesh: LogicalMesh) -> Span:
    moves = np.array(flat, dtype=np.int64).reshape(-1, 2)
    coordinates = _coordinates(moves, mesh)
    varying = (coordinates[:, 0] != coordinates[:, 1]).any(axis=0)
    axes = tuple(name for name, varies in zip(mesh.names, varying, strict=True) if varies)
    return Span(axes, mesh.num_slices(axes))


def _coordinates(ids: IntArray, mesh: LogicalMesh) -> IntArray:
    return np.stack(np.unravel_index(ids, mesh.shape), axis=-1)


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def in_mesh_order(axes: Iterable[str], mesh: LogicalMesh) -> AxisNames:
    """Returns the axes of more than one device, in the order of the mesh."""
    wanted = set(axes)
    return tuple(name for name, size in mesh.axes if name in wanted and size > 1)
