"""Brings a MindSpore strategy file to a step: finds its parameters by name, and joins its device matrices into one mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmdctx.errors import PlanMismatchError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import TensorSharding
from spmdctx.plan.mindspore.file import MindSporeStrategy, OpStrategy, ParameterLayout, mindspore_name
from spmdctx.plan.mismatch import MAX_DIFFERENCES, differences_text, nearest
from spmdctx.search.setup.device_matrix import DeviceMatrix, Piece, place


class Parameter(NamedTuple):
    """One argument leaf of a step, which files name."""

    path: str
    role: Role
    shape: tuple[int, ...]


class FilePins(NamedTuple):
    """The pins of a strategy file: the mesh, and the sharding of each path. `notes` tells which parts of the file have no effect."""

    mesh: LogicalMesh
    shardings: Mapping[str, TensorSharding]
    notes: tuple[str, ...]


class _Placed(NamedTuple):
    """A layout whose device matrix is cut so that the optimizer's sharding has axes of its own: the matrix, and each dimension's pieces."""

    matrix: DeviceMatrix
    dims: tuple[tuple[Piece, ...], ...]


def file_pins(
    strategy: MindSporeStrategy, parameters: Sequence[Parameter], num_devices: int, mesh: LogicalMesh | None, where: str
) -> FilePins:
    """Finds each entry's parameter and turns its layout into a sharding.

    Args:
        strategy: the file.
        parameters: the step's argument leaves.
        num_devices: devices of the step.
        mesh: the user's mesh, None to make one from the file's device matrices.
        where: name of the file.

    Raises:
        PlanMismatchError: no name of the file is a parameter of the step, or a shape or device count differs.
        StrategyError: device matrices that do not fit the user's mesh.
    """
    found, notes = _found(strategy, parameters, num_devices, where)
    differing = list(_differences(found, num_devices))
    if differing:
        raise PlanMismatchError(
            "The strategy file was made for another program or another number of devices.",
            where=where,
            got=differences_text(differing[:MAX_DIFFERENCES]),
            fix="leave strategy_ckpt_load_file out to plan without it",
        )
    matrices: dict[tuple[object, ...], tuple[DeviceMatrix, list[int]]] = {}
    placed = {parameter.path: _placed(layout, parameter.path, matrices) for parameter, layout in found}
    placement = place([matrix for matrix, _ in matrices.values()], num_devices, mesh)
    sizes = placement.mesh.sizes
    shardings = {
        path: tuple(tuple(name for name in placement.axes_of(pieces) if sizes[name] > 1) for pieces in one.dims)
        for path, one in placed.items()
    }
    return FilePins(placement.mesh, shardings, (*notes, *placement.notes))


def _found(
    strategy: MindSporeStrategy, parameters: Sequence[Parameter], num_devices: int, where: str
) -> tuple[list[tuple[Parameter, ParameterLayout]], list[str]]:
    """Returns entries with their parameters, and a note on each that has none."""
    found: list[tuple[Parameter, ParameterLayout]] = []
    unknown: list[str] = []
    for name, layout in strategy.layouts.items():
        fitting = _called(name, parameters)
        if len(fitting) == 1:
            found.append((fitting[0], layout))
        else:
            unknown.append(_unknown(name, fitting, parameters))
    known = {parameter.path for parameter, _ in found}
    for key, entry in strategy.strategies.items():
        name = key.partition("_")[2]
        fitting = _called(name, parameters)
        if len(fitting) == 1 and fitting[0].path not in known:
            own = _layout_of(entry, fitting[0], num_devices)
            found += [(fitting[0], own)] if own else []
            unknown += [] if own else [f"'{key}' has no operand whose slices fit '{fitting[0].path}'"]
        elif len(fitting) != 1 and name not in strategy.layouts:
            unknown.append(_unknown(name, fitting, parameters))
    if not found:
        raise PlanMismatchError(
            "The strategy file names no parameter of the step.",
            where=where,
            got=differences_text(unknown[:MAX_DIFFERENCES]) or "no entries",
            need="names such as " + ", ".join(mindspore_name(one.path) for one in parameters[:3]),
        )
    return found, [f"Strategy file: {text}: ignored." for text in dict.fromkeys(unknown)]


def _called(name: str, parameters: Sequence[Parameter]) -> list[Parameter]:
    """Returns the leaves of that name; if there are none, the parameters whose path ends in it; if there are none, other such leaves."""
    dotted = mindspore_name(name)
    exact = [one for one in parameters if mindspore_name(one.path) == dotted]
    if exact:
        return exact
    ending = [one for one in parameters if mindspore_name(one.path).endswith("." + dotted)]
    return [one for one in ending if one.role is Role.PARAMETER] or ending


def _unknown(name: str, fitting: Sequence[Parameter], parameters: Sequence[Parameter]) -> str:
    if fitting:
        return f"'{name}' may be {' or '.join(repr(one.path) for one in fitting[:3])}"
    near = nearest(name, [mindspore_name(one.path) for one in parameters])
    if not near:
        last = name.rpartition(".")[2]
        near = nearest(last, dict.fromkeys(one.path.rpartition("/")[2] for one in parameters))
    return f"'{name}' is no parameter of the step{near}"


def _layout_of(entry: OpStrategy, parameter: Parameter, num_devices: int) -> ParameterLayout | None:
    """Returns a layout from the slices of an op, or None if they fit no operand.

    The parameter is the last operand of its rank whose slices divide it.
    """
    for slices in reversed(entry.operands):
        fits = len(slices) == len(parameter.shape) and num_devices % math.prod(slices) == 0
        if fits and all(size % number == 0 for size, number in zip(parameter.shape, slices, strict=True)):
            matrix = (num_devices // math.prod(slices), *slices)
            return ParameterLayout(matrix, tuple((len(slices) - 1 - dim,) for dim in range(len(slices))), parameter.shape)
    return None


def _differences(found: Sequence[tuple[Parameter, ParameterLayout]], num_devices: int) -> list[str]:
    rows = []
    for parameter, layout in found:
        if layout.shape != parameter.shape:
            rows.append(f"'{parameter.path}': tensor_shape {list(layout.shape)} in the file, {list(parameter.shape)} here")
        elif math.prod(layout.device_matrix) != num_devices:
            rows.append(
                f"'{parameter.path}': dev_matrix {list(layout.device_matrix)} is for {math.prod(layout.device_matrix)} devices, "
                f"the step has {num_devices}"
            )
        else:
            rows += _bad_slices(parameter, layout)
    return rows


def _bad_slices(parameter: Parameter, layout: ParameterLayout) -> list[str]:
    last = len(layout.device_matrix) - 1
    for dim, (size, axes) in enumerate(zip(layout.shape, layout.tensor_map, strict=True)):
        slices = math.prod(layout.device_matrix[last - axis] for axis in axes) * (layout.shard_size or 1 if dim == 0 else 1)
        if size % slices:
            return [f"'{parameter.path}': dimension {dim} of size {size} does not divide into {slices} slices"]
    return []


def _placed(layout: ParameterLayout, path: str, matrices: dict[tuple[object, ...], tuple[DeviceMatrix, list[int]]]) -> _Placed:
    """Returns the pieces of each dimension; layouts of one device matrix share its pieces."""
    key = (layout.device_matrix, layout.shard_step, layout.shard_size)
    if key not in matrices:
        strides = _strides(layout)
        pieces = [Piece(major // minor) for major, minor in itertools.pairwise(strides)]
        matrices[key] = (DeviceMatrix(f"strategy file, '{path}'", pieces), strides)
    matrix, strides = matrices[key]
    ends = [math.prod(layout.device_matrix[index + 1 :]) for index in range(len(layout.device_matrix))]
    dims = []
    for dim, axes in enumerate(layout.tensor_map):
        spans = [(ends[-1 - axis], ends[-1 - axis] * layout.device_matrix[-1 - axis]) for axis in axes]
        if dim == 0 and layout.shard_size:
            spans.append((layout.shard_step, layout.shard_step * layout.shard_size))
        dims.append(tuple(piece for span in spans for piece in _between(matrix, strides, *span)))
    used = [piece for dim in dims for piece in dim]
    if len(set(used)) < len(used):
        raise PlanMismatchError(
            "The optimizer's sharding of a parameter uses devices that already hold different slices.",
            where=f"'{path}'",
            got=f"dev_matrix {list(layout.device_matrix)}, opt_weight_shard_step {layout.shard_step}, size {layout.shard_size}",
        )
    return _Placed(matrix, tuple(dims))


def _strides(layout: ParameterLayout) -> list[int]:
    """Returns the boundaries between the axes of the device matrix and of the optimizer's sharding, in ranks, largest first."""
    bounds = {1, *itertools.accumulate(reversed(layout.device_matrix), lambda a, b: a * b)}
    if layout.shard_size:
        bounds |= {layout.shard_step, layout.shard_step * layout.shard_size}
    ordered = sorted(bounds, reverse=True)
    if any(major % minor for major, minor in itertools.pairwise(ordered)) or ordered[0] > math.prod(layout.device_matrix):
        raise PlanMismatchError(
            "The optimizer's sharding of a parameter does not fit its device matrix.",
            got=f"dev_matrix {list(layout.device_matrix)}, opt_weight_shard_step {layout.shard_step}, size {layout.shard_size}",
        )
    return ordered


def _between(matrix: DeviceMatrix, strides: Sequence[int], low: int, high: int) -> list[Piece]:
    return [piece for piece, minor in zip(matrix.pieces, strides[1:], strict=True) if low <= minor < high]
