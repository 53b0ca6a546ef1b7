"""The logical mesh: named axes over devices, and what a sharding on it means for a tensor's shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spmdctx.errors import StrategyError
from spmdctx.ir.sharding import AxisNames, TensorSharding

DEFAULT_AXIS_NAMES = ("data", "model")


def axis_name(index: int) -> str:
    """Name of the mesh axis at `index` where the user gave none: data, model, axis2, axis3, ..."""
    return DEFAULT_AXIS_NAMES[index] if index < len(DEFAULT_AXIS_NAMES) else f"axis{index}"


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Named axes and their sizes, major first: the last axis runs over neighbouring devices."""

    axes: tuple[tuple[str, int], ...]
    sizes: dict[str, int] = field(init=False, compare=False, hash=False, repr=False)

    def __post_init__(self) -> None:
        sizes = dict(self.axes)
        if len(sizes) != len(self.axes):
            raise StrategyError("A mesh axis name is used twice.", got=", ".join(name for name, _ in self.axes))
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def of(cls, axes: Mapping[str, int] | Iterable[int]) -> LogicalMesh:
        """From {"name": size}, or from sizes alone, which get the default names."""
        if isinstance(axes, Mapping):
            return cls(tuple(axes.items()))
        return cls(tuple((axis_name(index), size) for index, size in enumerate(axes)))

    @property
    def names(self) -> AxisNames:
        """Axis names, major first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes, major first."""
        return tuple(size for _, size in self.axes)

    @property
    def num_devices(self) -> int:
        """Product of the axis sizes."""
        return math.prod(size for _, size in self.axes)

    def num_slices(self, axes: Iterable[str]) -> int:
        """Into how many slices `axes` split a dimension."""
        return math.prod(self.sizes[name] for name in axes)


@dataclass(frozen=True, slots=True)
class AnyOrder(LogicalMesh):
    """Meshes of the same axes in several orders at once, on which a collective costs what it costs on the best of them.

    What is cheapest here is a lower bound for each of `orders`, the cheapest price of which may not be that of one of them.
    """

    orders: tuple[LogicalMesh, ...]

    @classmethod
    def of_meshes(cls, meshes: Sequence[LogicalMesh]) -> AnyOrder:
        """From meshes of the same sizes in several orders; they get the names of the first one by size."""
        by_size = [sorted(mesh.names, key=mesh.sizes.__getitem__) for mesh in meshes]
        names = [dict(zip(own, by_size[0], strict=True)) for own in by_size]
        orders = [LogicalMesh(tuple((new[name], size) for name, size in mesh.axes)) for mesh, new in zip(meshes, names, strict=True)]
        return cls(meshes[0].axes, tuple(orders))


def replicated(rank: int) -> TensorSharding:
    """The sharding of a tensor of `rank` dimensions that every device holds whole."""
    return ((),) * rank


def axes_of(sharding: TensorSharding) -> AxisNames:
    """All axes that a sharding uses, in dimension order."""
    return tuple(name for dim in sharding for name in dim)


def local_shape(shape: tuple[int, ...], sharding: TensorSharding, mesh: LogicalMesh) -> tuple[int, ...]:
    """Shape of one device's block; a dimension that does not divide is rounded up, as XLA pads it."""
    return tuple(-(-size // mesh.num_slices(dim)) if dim else size for size, dim in zip(shape, sharding, strict=True))


def moved_axes(before: AxisNames, after: AxisNames, mesh: LogicalMesh) -> frozenset[str]:
    """Axes along which blocks move where a dimension is split over `after` instead of `before`: those that do not keep their place.

    An axis keeps its place where as many slices are split off after it.
    """
    old, new = ({name: mesh.num_slices(names[place + 1 :]) for place, name in enumerate(names)} for names in (before, after))
    return frozenset(name for name in (*before, *after) if old.get(name) != new.get(name))


def divides(shape: tuple[int, ...], sharding: TensorSharding, mesh: LogicalMesh) -> bool:
    """Whether every split dimension is a multiple of its number of slices."""
    return all(size % mesh.num_slices(dim) == 0 for size, dim in zip(shape, sharding, strict=True) if dim)


def format_sharding(sharding: TensorSharding) -> str:
    """`[data, model+axis2, -]`: axes per dimension, `-` where it is whole."""
    return "[" + ", ".join("+".join(dim) or "-" for dim in sharding) + "]"
