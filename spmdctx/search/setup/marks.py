"""The shardings that the marks of `shard()` regions pin, and the mesh that all regions share.

Each region has a device matrix with one axis per class of dimensions that belong together, in the order in which the
strategies name them: operands, parameters, results. If that needs more devices than there are, classes that never
meet in one marked tensor share an axis (sequence and hidden dimension in Megatron's sequence parallelism). A result that is
split further than its operands takes the axes of contracted dimensions first, which makes it a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmdctx.ir.graph import Graph, Mark
from spmdctx.ir.layout import Layout
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames
from spmdctx.search.setup.device_matrix import DeviceMatrix, Piece, place
from spmdctx.search.setup.mark_checks import check_mark, check_single_op
from spmdctx.search.setup.regions import DimClasses, Links, Node, base_side, node, single_op, spoken_dims

PinnedDims = tuple[AxisNames | None, ...]
"""Axes per dimension; None where the strategy leaves the dimension free (a dimension that vmap added)."""

_SIDES = ("in", "parameter", "out")

Key = tuple[str, int]
"""Side and index of a tensor on a region's boundary."""


class Resolved(NamedTuple):
    """The shardings that the marks of a program fix."""

    mesh: LogicalMesh
    pins: dict[int, PinnedDims]
    notes: tuple[str, ...]


def resolve_marks(graph: Graph, marks: Sequence[Mark], num_devices: int, mesh: LogicalMesh | None) -> Resolved:
    """Turns the strategies of all regions into shardings on one mesh.

    Args:
        graph: the traced step.
        marks: its `shard()` marks.
        num_devices: devices of the mesh.
        mesh: the user's mesh, whose axes are then taken as they are; None to make one.

    Raises:
        StrategyError: a strategy does not fit its tensor, its op, the devices or the mesh.
    """
    links = Links(graph, marks)
    by_region: dict[int, list[Mark]] = {}
    for mark in sorted(marks, key=lambda mark: mark.op):
        by_region.setdefault(mark.region, []).append(mark)
    layouts: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMatrix] = {}
    regions = []
    for members in by_region.values():
        if any(mark.strategy is not None for mark in members):
            op = single_op(links, members)
            for mark in members:
                check_mark(links, members, mark, op, num_devices)
            if op is not None:
                check_single_op(links, members, op, num_devices)
            regions.append(_MarkedRegion(links, members, num_devices, layouts))
    placement = place([matrix for region in regions for matrix in region.matrices], num_devices, mesh)
    pins: dict[int, PinnedDims] = {}
    for region in regions:
        for mark in region.marks:
            if mark.strategy is None:
                continue
            dims: list[AxisNames | None] = [None] * len(graph.values[mark.value].shape)
            for dim, pieces in zip(spoken_dims(mark), region.pieces[base_side(mark), mark.position], strict=True):
                dims[dim] = placement.axes_of(pieces)
            pins[mark.value] = tuple(dims)
    notes = dict.fromkeys([*(note for region in regions for note in region.notes), *placement.notes])
    return Resolved(placement.mesh, pins, tuple(notes))


class _MarkedRegion:
    """One region: its device matrices, and their pieces that split each dimension of each boundary tensor."""

    def __init__(
        self, links: Links, marks: Sequence[Mark], num_devices: int, layouts: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMatrix]
    ) -> None:
        self.marks = marks
        self.pieces: dict[Key, list[tuple[Piece, ...]]] = {}
        self.notes: list[str] = []
        self._num_devices = num_devices
        self._classes = DimClasses(links, marks)
        self._chains: dict[Node, list[Piece]] = {}
        self._matrix = DeviceMatrix(f"shard({marks[0].label})")
        self.matrices = [self._matrix]
        tensors = {(base_side(mark), mark.position): mark for mark in reversed(marks) if mark.strategy is not None}
        order = sorted(tensors, key=lambda key: (_SIDES.index(key[0]), key[1]))
        for key in order:
            self._take_layout(key, tensors[key], layouts)
        for key in order:
            if key not in self.pieces:
                self._take_slices(key, tensors[key])

    def _take_layout(self, key: Key, mark: Mark, layouts: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMatrix]) -> None:
        """Takes the device matrix of a Layout; the first Layout of a region gives the region its matrix."""
        layout = mark.strategy
        if not isinstance(layout, Layout):
            return
        name = (layout.device_matrix, layout.alias_name)
        if name not in layouts:
            pieces = [Piece(size, alias) for alias, size in zip(layout.alias_name, layout.device_matrix, strict=True)]
            layouts[name] = DeviceMatrix(f"Layout({layout.device_matrix}, {layout.alias_name})", pieces)
        matrix = layouts[name]
        if len(self.matrices) == 1 and not self._matrix.pieces:
            self._matrix, self.matrices = matrix, [matrix]
        elif matrix not in self.matrices:
            self.matrices.append(matrix)
        by_alias = {piece.name: piece for piece in matrix.pieces if piece.name}
        dims = layout.alias_tensor_map or ()
        self.pieces[key] = [tuple(by_alias[alias] for alias in dims[dim] or ()) for dim in spoken_dims(mark)]
        for dim, named in zip(spoken_dims(mark), self.pieces[key], strict=True):
            if named:
                self._chains.setdefault(self._classes.find(node(mark.value, dim)), list(named))

    def _take_slices(self, key: Key, mark: Mark) -> None:
        """Takes axes for a tuple of slices by the class of each dimension; a tensor for which that fails gets a matrix of its own."""
        assert isinstance(mark.strategy, tuple)
        dims = [(self._classes.find(node(mark.value, dim)), mark.strategy[dim]) for dim in spoken_dims(mark)]
        later = {leaf for name, number in dims if number > 1 for piece in self._chains.get(name, ()) for leaf in piece.leaves()}
        result: list[tuple[Piece, ...]] = []
        used: set[Piece] = set()
        for name, number in dims:
            split = self._split(name, number, used, later, key[0]) if number > 1 else ()
            if split is None:
                self._stand_alone(key, [number for _, number in dims])
                return
            used.update(leaf for piece in split for leaf in piece.leaves())
            result.append(split)
        self.pieces[key] = result

    def _split(self, name: Node, number: int, used: set[Piece], later: set[Piece], side: str) -> tuple[Piece, ...] | None:
        """Returns pieces with the product `number` for a dimension of class `name`, apart from those `used`; None if there are none."""
        chain = [leaf for piece in self._chains.get(name, ()) for leaf in piece.leaves()]
        if used.intersection(chain):
            chain, name = [], -1 - len(self._chains)
        taken: list[Piece] = []
        rest = number
        for piece in chain:
            if rest % piece.size == 0:
                taken.append(piece)
                rest //= piece.size
            elif rest > 1 and piece.size % rest == 0:
                taken.append(piece.cut(rest))
                rest = 1
            if rest == 1:
                return tuple(taken)
            if taken[-1:] != [piece]:
                return None
        new = self._allocate(rest, used | later | set(chain), side)
        if new is None:
            return None
        self._chains[name] = [*chain, *new]
        return (*taken, *new)

    def _allocate(self, size: int, barred: set[Piece], side: str) -> list[Piece] | None:
        """Returns a new axis of the device matrix.

        Returns an existing one where a result can be scattered over it, or where the devices run out.
        """
        fits = self._num_devices % (self._matrix.num_slices * size) == 0
        if side == "out" or not fits:
            leaves = self._matrix.leaves()
            for first in range(len(leaves)):
                product, last = 1, first
                while last < len(leaves) and product < size and leaves[last] not in barred:
                    product *= leaves[last].size
                    last += 1
                if product == size:
                    return leaves[first:last]
        if not fits:
            return None
        self._matrix.pieces.append(Piece(size))
        return [self._matrix.pieces[-1]]

    def _stand_alone(self, key: Key, slices: list[int]) -> None:
        matrix = DeviceMatrix(f"{self._matrix.cause}, {key[0]} {key[1]}")
        self.pieces[key] = []
        for number in slices:
            piece = (Piece(number),) if number > 1 else ()
            matrix.pieces.extend(piece)
            self.pieces[key].append(piece)
        self.matrices.append(matrix)
        self.notes.append(
            f"{self._matrix.cause}: {key[0]} {key[1]} does not fit the region's device matrix {self._matrix}; it is split on its own."
        )
