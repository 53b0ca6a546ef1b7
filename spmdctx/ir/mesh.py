"""The logical mesh: named axes over devices, and the blocks into which its axes cut a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from spmdctx.errors import StrategyError
from spmdctx.ir.sharding import AxisNames, TensorSharding

DEFAULT_AXIS_NAMES = ("data", "model")


@lru_cache
def _check_name(name: str) -> None:
    """Refuses a name with which XLA ends the process (jaxlib 0.10.2: no ASCII, a backslash), and the empty one, which JAX drops.

    Searches make many meshes of the same names, so an answer is kept.
    """
    if not (name and name.isascii() and name.isprintable()) or "\\" in name:
        raise StrategyError(
            "A mesh axis has a name that XLA cannot take.", got=ascii(name)[:80], need="printable ASCII without a backslash, not empty"
        )


def axis_name(index: int) -> str:
    """Returns the name of the mesh axis at `index` where the user gave none: data, model, axis2, axis3, ..."""
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
        for name in sizes:
            _check_name(name)
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def of(cls, axes: Mapping[str, int] | Iterable[int]) -> LogicalMesh:
        """Makes a mesh from {"name": size}, or from sizes alone; the axes then get the default names."""
        if isinstance(axes, Mapping):
            return cls(tuple(axes.items()))
        return cls(tuple((axis_name(index), size) for index, size in enumerate(axes)))

    @property
    def names(self) -> AxisNames:
        """The names of the axes, major first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, major first."""
        return tuple(size for _, size in self.axes)

    @property
    def num_devices(self) -> int:
        """The number of devices: the product of the axis sizes."""
        return math.prod(size for _, size in self.axes)

    def num_slices(self, axes: Iterable[str]) -> int:
        """Returns the number of slices into which `axes` split a dimension."""
        return math.prod(self.sizes[name] for name in axes)


@dataclass(frozen=True, slots=True)
class AnyOrder(LogicalMesh):
    """Several orders of the same mesh axes at once; a collective costs as much as on the order that is best for it.

    The cheapest price on this mesh is a lower bound for the price on each of `orders`. No single order has to reach it.
    """

    orders: tuple[LogicalMesh, ...]

    @classmethod
    def of_meshes(cls, meshes: Sequence[LogicalMesh]) -> AnyOrder:
        """Makes one of several meshes with as many axes, which get the names of the first mesh's in the order of their sizes."""
        by_size = [sorted(mesh.names, key=mesh.sizes.__getitem__) for mesh in meshes]
        names = [dict(zip(own, by_size[0], strict=True)) for own in by_size]
        orders = [LogicalMesh(tuple((new[name], size) for name, size in mesh.axes)) for mesh, new in zip(meshes, names, strict=True)]
        axes = tuple([(name, max(order.sizes[name] for order in orders)) for name in meshes[0].names])
        return cls(axes, tuple(orders))


@dataclass(frozen=True, slots=True)
class AnySizes(AnyOrder):
    """Meshes with axes of several sizes at once, of as many axes and devices. Whatever one of them allows is allowed.

    `axes` have their largest sizes. The cheapest price on this mesh, too, is a lower bound for the price on each of `orders`.
    """

    @property
    def num_devices(self) -> int:
        """The number of devices of each mesh."""
        return self.orders[0].num_devices

    @property
    def parts(self) -> tuple[AnyOrder, ...]:
        """The meshes of each sizes, with their axes in the order of this one's."""
        alike: dict[tuple[tuple[str, int], ...], list[LogicalMesh]] = {}
        for order in self.orders:
            alike.setdefault(tuple([(name, order.sizes[name]) for name in self.names]), []).append(order)
        return tuple([AnyOrder(axes, tuple(orders)) for axes, orders in alike.items()])

    def num_slices(self, axes: Iterable[str]) -> int:
        """Returns the most slices into which `axes` split a dimension on any of the meshes, or more."""
        return min(math.prod(self.sizes[name] for name in axes), self.num_devices)


@dataclass(frozen=True, slots=True)
class Blocks(LogicalMesh):
    """A mesh whose axes are used in blocks: each of the `blocks` of neighbouring axes splits a dimension as a whole, or not at all."""

    blocks: tuple[AxisNames, ...]


def parts_of(mesh: LogicalMesh) -> tuple[LogicalMesh, ...]:
    """Returns the meshes of one size for which a mesh stands: it alone, unless it stands for several sizes."""
    return mesh.parts if isinstance(mesh, AnySizes) else (mesh,)


def units(mesh: LogicalMesh) -> tuple[AxisNames, ...]:
    """Returns the axes that are used together, major first; one by one, unless the mesh has blocks."""
    return mesh.blocks if isinstance(mesh, Blocks) else tuple((name,) for name in mesh.names)


def replicated(rank: int) -> TensorSharding:
    """Returns the sharding of a tensor of `rank` dimensions that every device holds whole."""
    return ((),) * rank


def axes_of(sharding: TensorSharding) -> AxisNames:
    """Returns all axes that a sharding uses, in the order of the dimensions."""
    return tuple(name for dim in sharding for name in dim)


def local_shape(shape: tuple[int, ...], sharding: TensorSharding, mesh: LogicalMesh) -> tuple[int, ...]:
    """Returns the shape of one device's block; a dimension that does not divide is rounded up, as XLA pads it."""
    return tuple(-(-size // mesh.num_slices(dim)) if dim else size for size, dim in zip(shape, sharding, strict=True))


def moved_axes(before: AxisNames, after: AxisNames, mesh: LogicalMesh) -> frozenset[str]:
    """Returns the axes along which blocks move when `after` splits a dimension instead of `before`.

    No block moves along an axis that keeps its place: the axes behind it split as many slices before and after.
    """
    old, new = ({name: mesh.num_slices(names[place + 1 :]) for place, name in enumerate(names)} for names in (before, after))
    return frozenset(name for name in (*before, *after) if old.get(name) != new.get(name))


def divides(shape: tuple[int, ...], sharding: TensorSharding, mesh: LogicalMesh) -> bool:
    """Returns whether every split dimension is a multiple of its number of slices, and there are elements to split."""
    return (0 not in shape or not any(sharding)) and all(
        size % mesh.num_slices(dim) == 0 for size, dim in zip(shape, sharding, strict=True) if dim
    )


def format_sharding(sharding: TensorSharding) -> str:
    """Returns the axes of each dimension as text, `-` where it is whole: `[data, model+axis2, -]`."""
    return "[" + ", ".join("+".join(dim) or "-" for dim in sharding) + "]"
