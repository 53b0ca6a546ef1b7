"""MindSpore's tensor layouts: device matrices, tensor maps, and the user's `Layout`.

A device matrix numbers the devices row-major: its last axis runs over neighbouring ranks. A tensor map holds, per dimension
of a tensor, the device-matrix axis that splits it, counted from the RIGHT, or -1 where the dimension is whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdctx.errors import StrategyError, UnsupportedError, message

Strategy = tuple[int, ...]
"""The number of slices of each dimension."""

FREE = 0
"""Stands in a normalised strategy for a dimension that the user's strategy does not mention (one added by vmap)."""

WHOLE = -1
_NONE = "None"
_INTERLEAVED = "interleaved_parallel"


def nearest_fit(size: int, wanted: int, num_devices: int) -> int:
    """Returns the largest number of slices up to `wanted` that divides both the dimension and the devices."""
    return next(number for number in range(min(wanted, size, num_devices), 0, -1) if size % number == 0 and num_devices % number == 0)


def fitting_strategy(sizes: Sequence[int], wanted: Sequence[int], num_devices: int) -> Strategy:
    """Returns a strategy of at most `wanted` whose entries divide `sizes` and whose product divides the devices; keeps what fits."""
    numbers = [nearest_fit(size, number, num_devices) if number else FREE for size, number in zip(sizes, wanted, strict=True)]
    while num_devices % math.prod(number for number in numbers if number):
        largest = max(range(len(numbers)), key=lambda index: (numbers[index] > 1, numbers[index] != wanted[index], numbers[index]))
        numbers[largest] = nearest_fit(sizes[largest], numbers[largest] - 1, num_devices)
    return tuple(numbers)


@dataclass(frozen=True)
class Layout:
    """A device matrix with named axes; calling it with an axis name per dimension lays out a tensor.

        layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
        layout("dp", ("sp", "mp"), "None")

    A tuple splits one dimension over several axes, the first listed being the major one. "None" keeps a dimension whole.

    Attributes:
        device_matrix: sizes of the axes, row-major.
        alias_name: a name per axis.
        rank_list: the ranks in device-matrix order; only the natural order is supported.
        alias_tensor_map: axis names per dimension, None before the layout is called.
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    rank_list: tuple[int, ...] | None = None
    alias_tensor_map: tuple[tuple[str, ...] | None, ...] | None = None

    def __post_init__(self) -> None:
        _check_matrix(self.device_matrix)
        _check_aliases(self.alias_name, len(self.device_matrix))
        if self.rank_list is not None and tuple(self.rank_list) != tuple(range(math.prod(self.device_matrix))):
            raise StrategyError(
                "rank_list must be the natural order of the devices.", got=f"rank_list {self.rank_list}", fix="leave rank_list out"
            )

    def __call__(self, *tensor_map: str | tuple[str, ...]) -> Layout:
        """Returns the layout of a tensor, given an axis name, a tuple of names or "None" for each dimension."""
        dims = tuple(self._dim(entry) for entry in tensor_map)
        used = [name for dim in dims for name in dim]
        for name in used:
            if used.count(name) > 1:
                raise StrategyError(f"Layout axis {name!r} splits more than one dimension.", got=f"{tensor_map}")
        return Layout(self.device_matrix, self.alias_name, self.rank_list, dims)

    def _dim(self, entry: str | tuple[str, ...]) -> tuple[str, ...]:
        names = entry if isinstance(entry, tuple) else (entry,)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(message("A tensor map holds axis names or tuples of them.", got=f"{name!r} of type {type(name).__name__}"))
            if name != _NONE and name not in self.alias_name:
                raise StrategyError(f"Layout has no axis {name!r}.", got=repr(entry), need=f"names out of {self.alias_name}, or {_NONE!r}")
        return tuple(name for name in names if name != _NONE)

    @property
    def strategy(self) -> Strategy:
        """The number of slices of each dimension."""
        sizes = dict(zip(self.alias_name, self.device_matrix, strict=True))
        return tuple(FREE if dim is None else math.prod(sizes[name] for name in dim) for dim in self._placed())

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """The device-matrix axes of each dimension, counted from the right; -1 where the dimension is whole."""
        last = len(self.alias_name) - 1
        dims = [tuple(last - self.alias_name.index(name) for name in dim or ()) for dim in self._placed()]
        return tuple(dim if len(dim) > 1 else dim[0] if dim else WHOLE for dim in dims)

    def to_dict(self) -> dict[str, object]:
        """Returns the layout as MindSpore writes it."""
        return {
            "device_matrix": self.device_matrix,
            "tensor_map": self.tensor_map,
            "interleaved_parallel": False,
            "alias_name": self.alias_name,
            "rank_list": self.rank_list or tuple(range(math.prod(self.device_matrix))),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Layout:
        """Returns the layout that `to_dict` wrote; lists may stand for tuples.

        Raises:
            StrategyError: Keys are missing, or the tensor map names axes that the device matrix does not have.
            TypeError: A value has a wrong type.
        """
        for name in ("device_matrix", "alias_name", "tensor_map"):
            if not isinstance(content.get(name), list | tuple):
                raise StrategyError(f"A layout lacks {name!r}.", got=repr(dict(content)), need="what Layout.to_dict gives")
        aliases, ranks = tuple(content["alias_name"]), content.get("rank_list")
        layout = cls(tuple(content["device_matrix"]), aliases, None if ranks is None else tuple(ranks))
        layout = cls(layout.device_matrix, aliases)  # the ranks are in natural order, which needs no list
        dims = []
        for entry in content["tensor_map"]:
            axes = [axis for axis in (entry if isinstance(entry, list | tuple) else (entry,)) if axis != WHOLE]
            if not all(type(axis) is int and 0 <= axis < len(aliases) for axis in axes):
                raise StrategyError(
                    "A tensor map counts axes of the device matrix from the right, or has -1.", got=repr(content["tensor_map"])
                )
            dims.append(tuple(aliases[len(aliases) - 1 - axis] for axis in axes) or _NONE)
        return layout(*dims)

    def _placed(self) -> tuple[tuple[str, ...] | None, ...]:
        if self.alias_tensor_map is None:
            raise StrategyError("The Layout names no tensor dimensions yet.", fix='call it: layout("axis", "None")')
        return self.alias_tensor_map

    def with_free_dim(self, dim: int) -> Layout:
        """Returns the layout of the same tensor with one more dimension, which it leaves free."""
        dims = self._placed()
        return Layout(self.device_matrix, self.alias_name, self.rank_list, (*dims[:dim], None, *dims[dim:]))


def _check_matrix(device_matrix: object) -> None:
    if not isinstance(device_matrix, tuple):
        raise TypeError(message("device_matrix must be a tuple.", got=f"{device_matrix!r} of type {type(device_matrix).__name__}"))
    for size in device_matrix:
        if type(size) is not int:
            raise TypeError(message("device_matrix holds ints.", got=f"{size!r} of type {type(size).__name__}"))
        if size < 1:
            raise StrategyError(f"A device-matrix axis has size {size}.", got=f"device_matrix {device_matrix}", need="sizes of at least 1")


def _check_aliases(alias_name: object, rank: int) -> None:
    if not isinstance(alias_name, tuple):
        raise TypeError(message("alias_name must be a tuple.", got=f"{alias_name!r} of type {type(alias_name).__name__}"))
    for name in alias_name:
        if not isinstance(name, str):
            raise TypeError(message("alias_name holds strings.", got=f"{name!r} of type {type(name).__name__}"))
        if name in ("", _NONE):
            raise StrategyError(f"A layout axis cannot be called {name!r}.", need="a non-empty name other than 'None'")
    if len(alias_name) != rank:
        raise StrategyError(f"device_matrix has {rank} axes, alias_name {len(alias_name)}.", got=f"alias_name {alias_name}")
    if len(set(alias_name)) != len(alias_name):
        raise StrategyError("A layout axis name is used twice.", got=f"alias_name {alias_name}")
    if _INTERLEAVED in alias_name[:-1]:
        raise StrategyError(f"The layout axis {_INTERLEAVED!r} must be the last.", got=f"alias_name {alias_name}")
    if _INTERLEAVED in alias_name:
        raise UnsupportedError(f"The layout axis {_INTERLEAVED!r} is not supported.", fix="leave it out: XLA overlaps by itself")
