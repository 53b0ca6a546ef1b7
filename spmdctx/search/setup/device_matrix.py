"""The placement of the device matrices of several `shard()` regions on one mesh.

A device matrix numbers the devices row-major, so its axes are the intervals between the cumulative products of its sizes:
[2, 4] cuts 8 devices at 2, [4, 2] cuts them at 4. Matrices whose cuts divide one another share a mesh that has all the cuts:
[8], [2, 4] and [4, 2] need the mesh [2, 2, 2]. A matrix that cannot join ([2, 3] and [3, 2]) takes mesh axes out of order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spmdctx.errors import StrategyError
from spmdctx.ir.mesh import LogicalMesh, axis_name
from spmdctx.ir.sharding import AxisNames


@dataclass(eq=False, slots=True)
class Piece:
    """One axis of a device matrix, which may be cut into smaller ones; `name` is the alias of a Layout's axis, if it has one."""

    size: int
    name: str = ""
    parts: tuple[Piece, ...] = ()

    def leaves(self) -> list[Piece]:
        """Lists the uncut pieces of this one, major first."""
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]

    def cut(self, major: int) -> Piece:
        """Cuts the piece in two, and returns the major one, which has the size `major`."""
        self.parts = (Piece(major, self.name), Piece(self.size // major, self.name))
        return self.parts[0]


@dataclass(eq=False, slots=True)
class DeviceMatrix:
    """The axes of one region or Layout, major first; `cause` names it in messages."""

    cause: str
    pieces: list[Piece] = field(default_factory=list)

    def leaves(self) -> list[Piece]:
        """Lists all uncut pieces."""
        return [leaf for piece in self.pieces for leaf in piece.leaves()]

    @property
    def num_slices(self) -> int:
        """The product of the axes' sizes."""
        return math.prod(piece.size for piece in self.pieces)

    def __str__(self) -> str:
        return str([piece.size for piece in self.pieces])


@dataclass(frozen=True, slots=True)
class Placement:
    """A mesh, and the mesh axes of each uncut piece of each matrix."""

    mesh: LogicalMesh
    axes: Mapping[Piece, AxisNames]
    notes: tuple[str, ...]

    def axes_of(self, pieces: Iterable[Piece]) -> AxisNames:
        """Returns the mesh axes of `pieces`, major first."""
        return tuple(name for piece in pieces for leaf in piece.leaves() for name in self.axes[leaf])


def place(matrices: Sequence[DeviceMatrix], num_devices: int, mesh: LogicalMesh | None) -> Placement:
    """Finds one mesh for all matrices: the given one, or the coarsest that has an axis boundary wherever a matrix has one.

    Raises:
        StrategyError: a matrix does not fit the axes of the given mesh.
    """
    matrices = [matrix for matrix in matrices if matrix.num_slices > 1]
    if mesh is not None:
        return _place_on(matrices, mesh)
    cuts = [1, num_devices] if num_devices > 1 else [1]
    in_order, by_size, others = [], [], []
    for matrix in sorted(matrices, key=lambda matrix: matrix.num_slices < num_devices):
        joined = sorted({*cuts, *_cuts(matrix)})
        if joined == cuts:
            in_order.append(matrix)
        elif matrix.num_slices < num_devices and _pick([leaf.size for leaf in matrix.leaves()], _sizes(cuts)) is not None:
            # A matrix that repeats its computation takes whole axes that others have made, rather than parts of them.
            by_size.append(matrix)
        elif all(minor % major == 0 for major, minor in itertools.pairwise(joined)):
            cuts = joined
            in_order.append(matrix)
        else:
            others.append(matrix)
    sizes = _sizes(cuts)
    if any(_pick([leaf.size for leaf in matrix.leaves()], sizes) is None for matrix in others):
        sizes = [prime for size in sizes for prime in _primes(size)]
    chosen = {leaf: axes for matrix in in_order for leaf, axes in zip(matrix.leaves(), _in_order(matrix, sizes), strict=True)}
    for matrix in (*by_size, *others):
        leaves = matrix.leaves()
        picked = _pick([leaf.size for leaf in leaves], sizes)
        if picked is None:
            raise AssertionError(f"device matrix {matrix} does not divide {num_devices} devices")
        chosen.update(zip(leaves, picked, strict=True))
    names = _names(sizes or [1], chosen)
    notes = tuple(
        f"{matrix.cause}: device matrix {matrix} has no row-major place on the mesh {sizes}; its axes are taken out of order."
        for matrix in others
    )
    axes = {leaf: tuple(names[index] for index in indices) for leaf, indices in chosen.items()}
    return Placement(LogicalMesh(tuple(zip(names, sizes or [1], strict=True))), axes, notes)


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [minor // major for major, minor in itertools.pairwise(cuts)]


def _cuts(matrix: DeviceMatrix) -> list[int]:
    return list(itertools.accumulate((leaf.size for leaf in matrix.leaves()), lambda a, b: a * b))


def _in_order(matrix: DeviceMatrix, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the indices of the mesh axes in the interval of each leaf; the mesh has a boundary at each cut of the matrix."""
    found, index = [], 0
    for leaf in matrix.leaves():
        first, product = index, 1
        while product < leaf.size:
            product *= sizes[index]
            index += 1
        found.append(tuple(range(first, index)))
    return found


def _pick(wanted: Sequence[int], sizes: Sequence[int], taken: frozenset[int] = frozenset()) -> list[tuple[int, ...]] | None:
    """Returns disjoint groups of mesh axes whose products are `wanted`, few axes and major ones first; None if there are none."""
    if not wanted:
        return []
    free = [index for index in range(len(sizes)) if index not in taken and wanted[0] % sizes[index] == 0]
    for count in range(len(free) + 1):
        for group in itertools.combinations(free, count):
            if math.prod(sizes[index] for index in group) != wanted[0]:
                continue
            rest = _pick(wanted[1:], sizes, taken | set(group))
            if rest is not None:
                return [group, *rest]
    return None


def _place_on(matrices: Sequence[DeviceMatrix], mesh: LogicalMesh) -> Placement:
    """Places the matrices on the user's mesh: by alias if all are axes of it, in order if the boundaries agree, else by size."""
    axes: dict[Piece, AxisNames] = {}
    notes = []
    boundaries = {1, *itertools.accumulate(mesh.shape, lambda a, b: a * b)}
    for matrix in matrices:
        leaves = matrix.leaves()
        if all(mesh.sizes.get(leaf.name) == leaf.size for leaf in leaves):
            axes.update((leaf, (leaf.name,)) for leaf in leaves)
            continue
        in_order = boundaries.issuperset(_cuts(matrix))
        picked = _in_order(matrix, mesh.shape) if in_order else _pick([leaf.size for leaf in leaves], mesh.shape)
        if picked is None:
            raise StrategyError(
                f"The strategies of {matrix.cause} do not fit the axes of the mesh.",
                got=f"device matrix {matrix} on the mesh {mesh.sizes}",
                need="slices that are products of whole mesh axes",
                fix="use such slices, or leave mesh= out, so that the strategies make the mesh",
            )
        if not in_order:
            notes.append(f"{matrix.cause}: device matrix {matrix} takes the axes of the mesh {mesh.sizes} out of order.")
        axes.update((leaf, tuple(mesh.names[index] for index in group)) for leaf, group in zip(leaves, picked, strict=True))
    return Placement(mesh, axes, tuple(notes))


def _primes(number: int) -> list[int]:
    factors, candidate = [], 2
    while number > 1:
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        candidate += 1
    return factors


def _names(sizes: Sequence[int], chosen: Mapping[Piece, tuple[int, ...]]) -> list[str]:
    """Names each mesh axis: by the alias of its Layout axis (numbered if that was cut), else data, model, axis2, ..."""
    names: dict[int, str] = {}
    for leaf, indices in chosen.items():
        for index in indices:
            if leaf.name:
                names.setdefault(index, leaf.name)
    counts: dict[str, int] = {}
    taken: set[str] = set(names.values())
    result = []
    for index in range(len(sizes)):
        alias = names.get(index)
        if alias is None:
            name = next(name for name in map(axis_name, itertools.count(index)) if name not in taken)
        else:
            counts[alias] = counts.get(alias, 0) + 1
            several = list(names.values()).count(alias) > 1
            name = f"{alias}_{counts[alias]}" if several else alias
        taken.add(name)
        result.append(name)
    return result
