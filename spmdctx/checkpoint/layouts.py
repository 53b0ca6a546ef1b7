"""Layouts, which tell the block of a tensor that each rank holds: from strategy files, plans and sharded arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from spmdctx.checkpoint.blocks import Block, block_of, whole
from spmdctx.checkpoint.tree import StateTree, stored_form
from spmdctx.errors import CheckpointError, ContextError, UnsupportedError, message
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.plan.data import PlannedTensor
from spmdctx.plan.file import read_strategy
from spmdctx.plan.mindspore.file import MindSporeStrategy, ParameterLayout, mindspore_name, tensor_layout
from spmdctx.plan.plan import Plan

Layouts = Mapping[str, ParameterLayout]
"""Maps the name of each tensor, the parts of its path joined by dots, to its layout."""

Strategy = str | os.PathLike[str] | Plan | Layouts
"""A description of how tensors are split: a strategy file of MindSpore in JSON, a plan or its file, or layouts by name."""

_SAVED_ROLES = (Role.PARAMETER, Role.OPTIMIZER, Role.STATE, Role.KEY)


class Slicing(NamedTuple):
    """The layouts of a whole checkpoint; without any, one rank holds all.

    Attributes:
        layouts: by name; tensors without one are whole on every rank.
        num_ranks: how many ranks there are.
    """

    layouts: Layouts
    num_ranks: int

    def block(self, name: str, shape: Sequence[int], rank: int) -> Block:
        """Returns the block that a rank holds of a tensor with that global shape."""
        layout = self.layouts.get(name)
        return whole(shape) if layout is None else block_of(layout, rank)


def slicing(strategy: Strategy | None, where: str = "") -> Slicing:
    """Reads what says how tensors are split; None is one rank that holds all.

    Raises:
        PlanFormatError: a file that is no strategy.
        CheckpointError: a file that is not there, layouts for different numbers of devices, or none at all.
        TypeError: something else.
    """
    if strategy is None:
        return Slicing({}, 1)
    layouts = layouts_of(strategy)
    counts = {math.prod(layout.device_matrix): name for name, layout in layouts.items()}
    if len(counts) > 1:
        got = ", ".join(f"{count} devices for '{name}'" for count, name in sorted(counts.items()))
        raise CheckpointError("The layouts are for different numbers of devices.", where=where or str(strategy)[:80], got=got)
    if not counts:
        raise CheckpointError("The strategy has no layouts of tensors.", where=where or str(strategy)[:80], need="parallel_layout_item")
    return Slicing(layouts, next(iter(counts)))


def layouts_of(strategy: Strategy) -> dict[str, ParameterLayout]:
    """Returns layouts by name; arguments and errors as for `slicing`."""
    if isinstance(strategy, Mapping):
        for name, layout in strategy.items():
            if not isinstance(layout, ParameterLayout):
                raise TypeError(message("Layouts are what build_searched_strategy gives.", where=str(name), got=type(layout).__name__))
        return {mindspore_name(name): layout for name, layout in strategy.items()}
    if not isinstance(strategy, str | os.PathLike | Plan):
        raise TypeError(message("A strategy is a file, a plan, or layouts by name.", got=f"{strategy!r} of type {type(strategy).__name__}"))
    found = strategy if isinstance(strategy, Plan) else _read(strategy)
    if not isinstance(found, Plan):
        return {mindspore_name(name): layout for name, layout in found.layouts.items()}
    return plan_layouts(found)


def _read(path: str | os.PathLike[str]) -> Plan | MindSporeStrategy:
    try:
        if os.path.isdir(path):
            raise CheckpointError("A strategy file cannot be read.", where=os.fspath(path), got="a folder")
        return read_strategy(path, Plan)
    except FileNotFoundError as error:
        raise CheckpointError("There is no such strategy file.", where=os.fspath(path)) from error
    except OSError as error:
        raise CheckpointError("A strategy file cannot be read.", where=os.fspath(path), got=error.strerror or str(error)) from error


def plan_layouts(plan: Plan, roles: Iterable[Role] = _SAVED_ROLES) -> dict[str, ParameterLayout]:
    """Returns the layouts of a plan's arguments of these roles, by their dotted paths."""
    kept = set(roles)
    return {mindspore_name(tensor.path): tensor_layout(tensor, plan.logical_mesh) for tensor in plan.inputs if tensor.role in kept}


def predicted_layouts(plan: Plan) -> dict[str, ParameterLayout]:
    """Returns the layouts of a forward step's arguments except its batch.

    Raises:
        ContextError: the plan's mode makes no layouts.
    """
    if plan.mode not in ("semi_auto_parallel", "auto_parallel"):
        raise ContextError(
            "Layouts of a prediction are inferred in semi_auto_parallel and auto_parallel.", got=f"parallel_mode {plan.mode!r}"
        )
    return plan_layouts(plan)


def state_layouts(state: Any) -> dict[str, ParameterLayout]:
    """Returns the layouts of a state's arrays as they are placed.

    Raises:
        UnsupportedError: an array is neither on one device nor on a mesh.
        CheckpointError: arrays are on different devices.
    """
    tree = StateTree(state)
    shardings = {path: getattr(leaf, "sharding", None) for path, leaf in zip(tree.paths, tree.leaves, strict=True)}
    meshes = {id(own.mesh): own.mesh for own in shardings.values() if isinstance(own, NamedSharding)}
    devices = {tuple(device.id for device in mesh.devices.flat) for mesh in meshes.values()}
    if len(devices) > 1:
        raise CheckpointError("Arrays of the state lie on different devices.", got=" and ".join(map(str, sorted(devices))))
    count = len(next(iter(devices))) if devices else 1
    found = {}
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        own, shape = shardings[path], stored_form(path, leaf).shape
        if isinstance(own, NamedSharding):
            found[mindspore_name(path)] = _sharded(path, own, shape)
        elif own is None or own.is_fully_replicated:
            found[mindspore_name(path)] = ParameterLayout((count,), ((),) * len(shape), shape)
        else:
            raise UnsupportedError("Files per rank need arrays on a mesh (NamedSharding).", where=path, got=type(own).__name__)
    return found


def _sharded(path: str, sharding: NamedSharding, shape: tuple[int, ...]) -> ParameterLayout:
    mesh = LogicalMesh(tuple((str(name), size) for name, size in sharding.mesh.shape.items()))
    dims = [() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in sharding.spec]
    dims += [()] * (len(shape) - len(dims))
    return tensor_layout(PlannedTensor(path, Role.STATE, shape, "", tuple(dims)), mesh)


def build_searched_strategy(strategy_filename: str | os.PathLike[str]) -> dict[str, ParameterLayout]:
    """Returns the layouts in a strategy file of MindSpore in JSON, or in a plan file, with names as in the files per rank.

    Args:
        strategy_filename: the file.

    Raises:
        TypeError: the argument is not a path.
        CheckpointError: there is no such file.
        PlanFormatError: the file is not a strategy file.
    """
    if not isinstance(strategy_filename, str | os.PathLike):
        raise TypeError(
            message("strategy_filename must be a path.", got=f"{strategy_filename!r} of type {type(strategy_filename).__name__}")
        )
    if not os.path.isfile(strategy_filename):
        raise CheckpointError("There is no such strategy file.", where=os.fspath(strategy_filename))
    return layouts_of(strategy_filename)


def rank_devices(shardings: Iterable[Any]) -> Sequence[Any]:
    """Returns the devices in the order of the ranks: those of the meshes, or all of JAX's if there is no mesh."""
    for own in shardings:
        if isinstance(own, NamedSharding):
            return list(own.mesh.devices.flat)
    return jax.devices()
