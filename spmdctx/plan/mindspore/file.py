"""Reads MindSpore's strategy files in JSON into layouts and strategies by name, and writes them from plans.

    {"current_stage": 0,
     "parallel_strategy_item": {"MatMul_w": {"stage": 0, "parallel_strategy": [[2, 1], [1, 4]]}},
     "parallel_layout_item": {"w": {"dev_matrix": [2, 4], "tensor_map": [-1, 0], "tensor_shape": [64, 128], "field": 0,
                                    "opt_weight_shard_step": 0, "opt_weight_shard_size": 0}}}

A `tensor_map` holds for each dimension the device-matrix axis that splits it, counted from the right, or -1 if it is whole. In
newer versions it may hold a list of axes, major first. `opt_weight_shard_size` devices that lie `opt_weight_shard_step` ranks apart hold
further slices of dimension 0, which are gathered where the parameter is read.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from spmdctx.errors import PlanFormatError, UnsupportedError, shown
from spmdctx.ir.graph import LITERAL, Op, Role
from spmdctx.ir.mesh import LogicalMesh, format_sharding
from spmdctx.ir.primitives import RENAMES, Boundary
from spmdctx.ir.projection import project
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.plan.data import OpTable, PlanData, PlannedTensor
from spmdctx.wording.files import read_file, write_file
from spmdctx.wording.text_data import read_json_text

STRATEGIES, LAYOUTS = "parallel_strategy_item", "parallel_layout_item"
WHOLE = -1

_MOST_DEVICES, _MOST_DIMS, _MOST_OPERANDS = 1 << 16, 32, 4096
"""No strategy is for more devices, no tensor has more dimensions, and no op more operands."""

_OP_TYPES = {"gather": "Gather", "conv_general_dilated": "Conv2D", "sub": "Sub", "add_any": "Add"}

TensorMap = tuple[tuple[int, ...], ...]
"""The device-matrix axes of each dimension, counted from the right, major first; empty if the dimension is whole."""


class ParameterLayout(NamedTuple):
    """One entry of `parallel_layout_item`; `shard_step` and `shard_size` are 0 if no optimizer shards the parameter."""

    device_matrix: tuple[int, ...]
    tensor_map: TensorMap
    shape: tuple[int, ...]
    shard_step: int = 0
    shard_size: int = 0


class OpStrategy(NamedTuple):
    """One entry of `parallel_strategy_item`: the slices of each operand's dimensions."""

    stage: int
    operands: tuple[tuple[int, ...], ...]


class MindSporeStrategy(NamedTuple):
    """The content of a strategy file. A key of `strategies` joins an op type and a parameter's name by an underscore."""

    layouts: Mapping[str, ParameterLayout]
    strategies: Mapping[str, OpStrategy]


def is_mindspore(body: Any) -> bool:
    """Returns whether parsed JSON is one of MindSpore's strategy files."""
    return isinstance(body, dict) and (LAYOUTS in body or STRATEGIES in body)


def parse_mindspore(body: Mapping[str, Any], where: str) -> MindSporeStrategy:
    """Reads a parsed strategy file.

    Raises:
        PlanFormatError: an entry lacks a part that it must have; the message names the entry.
    """
    parsed: dict[str, dict[str, Any]] = {LAYOUTS: {}, STRATEGIES: {}}
    for section, read in ((LAYOUTS, _layout), (STRATEGIES, _strategy)):
        entries = body.get(section)
        if entries is None:
            continue
        if not isinstance(entries, dict):
            raise PlanFormatError(f"{section} of the strategy file must hold entries by name.", where=where, got=type(entries).__name__)
        for name, entry in entries.items():
            try:
                parsed[section][name] = read(entry)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise PlanFormatError(
                    f"Entry {shown(name)} of {section} cannot be read.", where=where, got=f"{type(error).__name__}: {error}"
                ) from error
    return MindSporeStrategy(parsed[LAYOUTS], parsed[STRATEGIES])


def _layout(entry: Mapping[str, Any]) -> ParameterLayout:
    matrix, shape = _slices_of(entry["dev_matrix"]), tuple(_count(size, 0) for size in _list(entry["tensor_shape"]))
    dims = tuple(tuple(axis for axis in (own if isinstance(own, list) else [own]) if axis != WHOLE) for own in _list(entry["tensor_map"]))
    if len(dims) != len(shape):
        raise ValueError(f"tensor_map has {len(dims)} entries, tensor_shape {len(shape)}")
    used = [axis for dim in dims for axis in dim]
    if any(type(axis) is not int or not 0 <= axis < len(matrix) for axis in used):
        raise ValueError(f"tensor_map {shown(entry['tensor_map'])} names axes that dev_matrix {list(matrix)} does not have")
    if len(set(used)) < len(used):
        raise ValueError(f"tensor_map {shown(entry['tensor_map'])} uses an axis twice")
    size, step = (_count(entry.get(f"opt_weight_shard_{part}", 0), -1, math.prod(matrix)) for part in ("size", "step"))
    return ParameterLayout(matrix, dims, shape, *((step, size) if size > 1 and step > 0 else (0, 0)))


def _strategy(entry: Mapping[str, Any]) -> OpStrategy:
    return OpStrategy(_count(entry.get("stage", 0), 0), tuple(map(_slices_of, _list(entry["parallel_strategy"], _MOST_OPERANDS))))


def _slices_of(value: Any) -> tuple[int, ...]:
    """Returns numbers of slices, or of devices, by dimension."""
    found = tuple(_count(size, 1, _MOST_DEVICES) for size in _list(value))
    _count(math.prod(found), 1, _MOST_DEVICES)
    return found


def _list(value: Any, most: int = _MOST_DIMS) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is no list")
    if len(value) > most:
        raise ValueError(f"a list of {len(value)}, and not of at most {most}")
    return value


def _count(value: Any, low: int, high: int = 1 << 62) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{shown(value)} is no size or number from {low} to {high}")
    return value


def write_mindspore(plan: PlanData, path: str | os.PathLike[str], *, only_parameters: bool = True, several_axes: bool = False) -> None:
    """Writes a plan's parameters as a MindSpore strategy file.

    Args:
        plan: any plan.
        path: the file; MindSpore tells the format by the suffix, which must be `.json`.
        only_parameters: leave out optimizer state and other state.
        several_axes: allow dimensions that are split over device-matrix axes which do not lie side by side. Only newer
            versions of MindSpore read these.

    Raises:
        UnsupportedError: shardings that the format cannot hold, by name, or a path without the suffix.
        FileError: the file cannot be written; a former one is as it was.
    """
    target = Path(path)
    if target.suffix != ".json":
        raise UnsupportedError("MindSpore takes a strategy file for JSON by its suffix.", got=target.name, fix="end the name in .json")
    write_file(target, _text(mindspore_body(plan, only_parameters=only_parameters, several_axes=several_axes)))


def _text(body: Mapping[str, Any]) -> str:
    """Returns JSON with one line per entry."""
    parts = [f'"current_stage": {body["current_stage"]}']
    for section in (STRATEGIES, LAYOUTS):
        rows = ",\n".join(f"    {json.dumps(name, ensure_ascii=False)}: {json.dumps(entry)}" for name, entry in body[section].items())
        parts.append(f'"{section}": {{\n{rows}\n  }}')
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"


def mindspore_body(plan: PlanData, *, only_parameters: bool = True, several_axes: bool = False) -> dict[str, Any]:
    """Returns the strategy file of a plan as plain data; arguments as for `write_mindspore`."""
    layouts: dict[str, Any] = {}
    strategies: dict[str, Any] = {}
    refused = []
    readers = _first_readers(plan.op_table)
    kept = (Role.PARAMETER,) if only_parameters else (Role.PARAMETER, Role.OPTIMIZER, Role.STATE)
    for tensor, value in zip(plan.inputs, plan.op_table.inputs, strict=True):
        if tensor.role not in kept or not tensor.shape:
            continue
        name, reader = mindspore_name(tensor.path), readers.get(value)
        entry = _layout_entry(tensor, plan.logical_mesh, None if reader is None else _needs(plan.op_table, *reader))
        if any(isinstance(axis, list) for axis in entry["tensor_map"]) and not several_axes:
            refused.append(f"'{tensor.path}' {format_sharding(tensor.sharding)}")
        layouts[name] = entry
        if reader is not None:
            op = plan.op_table.operations[reader[0]]
            strategies[f"{_op_type(op)}_{name}"] = {"stage": 0, "parallel_strategy": _slices(plan, op)}
    if refused:
        raise UnsupportedError(
            "Dimensions split over device-matrix axes that do not lie side by side have no entry in MindSpore 2.0's strategy files.",
            got=", ".join(refused[:4]) + (f" and {len(refused) - 4} more" if len(refused) > 4 else ""),
            fix="pass several_axes=True, which newer versions of MindSpore read",
        )
    return {"current_stage": 0, STRATEGIES: strategies, LAYOUTS: layouts}


def mindspore_name(path: str) -> str:
    """Returns a path as MindSpore writes it: with dots between its parts."""
    return path.replace("/", ".")


def _first_readers(table: OpTable) -> dict[int, tuple[int, int]]:
    """Returns, for each input, the first op that computes with it (or with a cast of it), and the position of the operand."""
    same = {value: value for value in table.inputs}
    found: dict[int, tuple[int, int]] = {}
    for index, op in enumerate(table.operations):
        for position, value in enumerate(op.operands):
            own = same.get(value, LITERAL)
            if own == LITERAL or own in found:
                continue
            if op.primitive in RENAMES or op.boundary in (Boundary.ENTER, Boundary.NEXT):
                same[op.results[0]] = own
            elif any(op.rule.operands[position]):
                found[own] = (index, position)
    return found


def _needs(table: OpTable, index: int, position: int) -> TensorSharding:
    return project(table.operations[index].rule.operands[position], table.choices[index].axes)


def _slices(plan: PlanData, op: Op) -> list[list[int]]:
    axes = plan.op_table.choices[op.id].axes
    return [
        [plan.logical_mesh.num_slices(dim) for dim in project(dims, axes)]
        for value, dims in zip(op.operands, op.rule.operands, strict=True)
        if value != LITERAL
    ]


def _op_type(op: Op) -> str:
    if op.primitive == "dot_general":
        return "MatMul" if all(len(dims) <= 2 for dims in op.rule.operands) else "BatchMatMul"
    return _OP_TYPES.get(op.primitive) or "".join(word.capitalize() for word in op.primitive.split("_"))


def tensor_layout(tensor: PlannedTensor, mesh: LogicalMesh) -> ParameterLayout:
    """Returns the layout of one leaf on its own, all of whose split counts as the tensor's rather than the optimizer's."""
    return _layout(_layout_entry(tensor, mesh, None))


def layout_entry(layout: ParameterLayout) -> dict[str, Any]:
    """Returns a layout as an entry of `parallel_layout_item`."""
    return {
        "dev_matrix": list(layout.device_matrix),
        "tensor_map": [list(axes) if len(axes) > 1 else axes[0] if axes else WHOLE for axes in layout.tensor_map],
        "tensor_shape": list(layout.shape),
        "field": 0,
        "opt_weight_shard_step": layout.shard_step,
        "opt_weight_shard_size": layout.shard_size,
    }


def write_layouts(layouts: Mapping[str, ParameterLayout], path: str | os.PathLike[str]) -> None:
    """Writes layouts by name as a strategy file, and makes its folder; the file is read back before it gets its name.

    Raises:
        FileError: the file cannot be written; a former one is as it was.
    """
    body = {"current_stage": 0, STRATEGIES: {}, LAYOUTS: {name: layout_entry(layout) for name, layout in layouts.items()}}
    write_file(path, _text(body), lambda made: parse_mindspore(read_json_text(read_file(made)), os.fspath(path)))


def _layout_entry(tensor: PlannedTensor, mesh: LogicalMesh, needs: TensorSharding | None) -> dict[str, Any]:
    """Returns the layout of a tensor as an entry.

    Dimension 0 may be split further than its reader needs it; that part is the optimizer's sharding.
    """
    stored = tensor.sharding or ((),)
    count = len(stored[0])
    if needs is not None and len(needs) == len(stored) and needs[1:] == stored[1:] and stored[0][: len(needs[0])] == needs[0]:
        count = len(needs[0])
    # A split that the map alone cannot hold may be written as the optimizer's: the slices are the same.
    for kept in dict.fromkeys((count, *range(len(stored[0]), -1, -1))):
        own, extra = (stored[0][:kept], *stored[1:]), stored[0][kept:]
        matrix, tensor_map = _device_matrix(own, mesh)
        if (not extra or _run(extra, mesh)) and not any(isinstance(axes, list) for axes in tensor_map):
            break
    else:
        extra = ()
        matrix, tensor_map = _device_matrix(stored, mesh)
    return {
        "dev_matrix": matrix,
        "tensor_map": tensor_map[: len(tensor.shape)],
        "tensor_shape": list(tensor.shape),
        "field": 0,
        "opt_weight_shard_step": math.prod(mesh.shape[mesh.names.index(extra[-1]) + 1 :]) if extra else 0,
        "opt_weight_shard_size": mesh.num_slices(extra) if extra else 0,
    }


def _run(axes: AxisNames, mesh: LogicalMesh) -> bool:
    """Returns whether axes lie side by side in the mesh, in its order."""
    first = mesh.names.index(axes[0])
    return mesh.names[first : first + len(axes)] == axes


def _device_matrix(sharding: TensorSharding, mesh: LogicalMesh) -> tuple[list[int], list[Any]]:
    """Returns the device matrix of a sharding, and the tensor map on it.

    The matrix is the mesh without axes of size 1, and with side-by-side axes of one dimension joined.
    """
    dims = [tuple(name for name in dim if mesh.sizes[name] > 1) for dim in sharding]
    pieces = [*_pieces([name for name, size in mesh.axes if size > 1], dims)]
    place = {name: len(pieces) - 1 - index for index, piece in enumerate(pieces) for name in piece}
    tensor_map: list[Any] = []
    for dim in dims:
        numbers = list(dict.fromkeys(place[name] for name in dim))
        tensor_map.append(numbers if len(numbers) > 1 else numbers[0] if numbers else WHOLE)
    return [mesh.num_slices(piece) for piece in pieces] or [1], tensor_map


def _pieces(names: list[str], dims: list[AxisNames]) -> Iterator[AxisNames]:
    """Gives the runs of mesh axes that one dimension uses in the mesh's order, and every other axis on its own."""
    follows = {after: before for dim in dims for before, after in itertools.pairwise(dim)}
    piece: AxisNames = ()
    for name in names:
        if piece and follows.get(name) == piece[-1]:
            piece = (*piece, name)
        else:
            if piece:
                yield piece
            piece = (name,)
    if piece:
        yield piece
