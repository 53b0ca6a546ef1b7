"""Shardings as rows of small integers, so that NumPy handles whole domains at once.

On a mesh with axes a, b the *codes* of one dimension are (), a, b, ab, ba: every ordered choice of axes, major first. A sharding
is a row of codes whose axes are disjoint; the domain of a shape holds all rows that divide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import combinations, permutations

import numpy as np

from spmdctx.ir.arrays import IntArray
from spmdctx.ir.mesh import Blocks, LogicalMesh, moved_axes, parts_of
from spmdctx.ir.sharding import AxisNames, TensorSharding

MAX_ORDERED_AXES = 3
"""On meshes with more axes, the axes of one dimension keep the order of the mesh."""


class AxisCodes:
    """The codes of one mesh: the axes of each code, its number of slices, and its axes as bits. Code 0 is the empty one.

    `each` has the slices on every mesh for which the mesh stands. [mesh, code]
    """

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        names = [name for name, size in mesh.axes if size > 1]
        if len(names) == MAX_ORDERED_AXES:
            # By size: meshes of the same axes in another order have the same codes but for the names.
            names.sort(key=mesh.sizes.__getitem__)
        self.units: list[AxisNames] = list(mesh.blocks) if isinstance(mesh, Blocks) else [(name,) for name in names]
        is_ordered = len(names) <= MAX_ORDERED_AXES and not isinstance(mesh, Blocks)
        choose = permutations if is_ordered else combinations
        self.axes: list[AxisNames] = [sum(own, ()) for count in range(len(self.units) + 1) for own in choose(self.units, count)]
        self.of: dict[AxisNames, int] = {own: code for code, own in enumerate(self.axes)}
        self.slices = np.array([mesh.num_slices(own) for own in self.axes], dtype=np.int64)
        self.each = np.array([[part.num_slices(own) for own in self.axes] for part in parts_of(mesh)], dtype=np.int64)
        self._known: dict[int, IntArray] = {}
        self._unit_of = {name: place for place, unit in enumerate(self.units) for name in unit}
        self.bits = np.array([self.bits_of(own) for own in self.axes], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.axes)

    @cached_property
    def joined(self) -> IntArray:
        """`joined[i, j]`: the code of the axes of i followed by those of j; -1 where there is none."""
        pairs = [[self.of.get(first + second, -1) for second in self.axes] for first in self.axes]
        return np.array(pairs, dtype=np.int64)

    @cached_property
    def added(self) -> IntArray:
        """`added[i, j]`: the axes, as bits, that the code j has after those of i; 0 where it does not begin with them."""
        begins = [[second[: len(first)] == first for second in self.axes] for first in self.axes]
        found: IntArray = np.where(begins, self.bits[None, :] - self.bits[:, None], 0)
        return found

    @cached_property
    def moved(self) -> IntArray:
        """`moved[i, j]`: the axes, as bits, along which blocks move from the code i to j (`ir.mesh.moved_axes`)."""
        pairs = [[self.bits_of(moved_axes(one, other, self.mesh)) for other in self.axes] for one in self.axes]
        return np.array(pairs, dtype=np.int64)

    def names(self, bits: int) -> AxisNames:
        """Returns the axes of a set of bits, in the order of the mesh; if the mesh has three, by size."""
        return tuple([name for place, unit in enumerate(self.units) if bits >> place & 1 for name in unit])

    def bits_of(self, axes: Iterable[str]) -> int:
        """Returns the bits of some axes."""
        return sum(1 << place for place in {self._unit_of[name] for name in axes})

    def code(self, axes: AxisNames) -> int:
        """Returns the code of some axes, -1 if there is none; axes of size 1 split nothing and are ignored."""
        return self.of.get(tuple([name for name in axes if self.mesh.sizes[name] > 1]), -1)

    def sharding(self, row: Sequence[int]) -> TensorSharding:
        """Returns the sharding that a row stands for."""
        return tuple([self.axes[code] for code in row])

    def _dividing(self, size: int) -> IntArray:
        """Returns the codes whose slices divide a size."""
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = np.nonzero((size % self.each == 0).any(axis=0))[0]
        return found

    def rows(self, sizes: Sequence[int], splittable: Sequence[bool] | None = None) -> IntArray:
        """Returns all rows of disjoint codes that divide `sizes`, in lexicographic order. [rows, dims]"""
        rows = np.zeros((1, 0), dtype=np.int64)
        used = np.zeros(1, dtype=np.int64)
        for place, size in enumerate(sizes):
            fitting = self._dividing(size) if splittable is None or splittable[place] else np.zeros(1, dtype=np.int64)
            free = (used[:, None] & self.bits[fitting][None, :]) == 0
            first, second = np.nonzero(free)
            rows = np.concatenate([rows[first], fitting[second][:, None]], axis=1)
            used = used[first] | self.bits[fitting[second]]
        return rows


class Domain:
    """The shardings of one shape, numbered; number 0 is the replicated one, and the only one of a tensor without elements."""

    def __init__(self, codes: AxisCodes, shape: tuple[int, ...]) -> None:
        self.codes, self.shape = codes, shape
        self.rows = codes.rows(shape, [False] * len(shape) if 0 in shape else None)
        self._weights = len(codes) ** np.arange(len(shape) - 1, -1, -1, dtype=np.int64)
        self._keys = self.rows @ self._weights

    def __len__(self) -> int:
        return len(self.rows)

    def numbers(self, rows: IntArray) -> IntArray:
        """Returns the numbers of rows, -1 for those that do not divide the shape."""
        keys = rows @ self._weights
        found = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where((self._keys[found] == keys) & (rows >= 0).all(axis=1), found, -1)

    def number(self, sharding: TensorSharding) -> int:
        """Returns the number of a sharding, -1 if it is not in the domain."""
        row = np.array([[self.codes.code(axes) for axes in sharding]], dtype=np.int64).reshape(1, len(self.shape))
        return int(self.numbers(row)[0])

    @cached_property
    def shardings(self) -> tuple[TensorSharding, ...]:
        """The sharding of each number."""
        return tuple([self.codes.sharding(row) for row in self.rows.tolist()])

    @cached_property
    def slices(self) -> IntArray:
        """The number of blocks into which the sharding of each number cuts the tensor."""
        found: IntArray = np.minimum(np.prod(self.codes.slices[self.rows], axis=1, dtype=np.int64), self.codes.mesh.num_devices)
        return found


@lru_cache(maxsize=256)
def axis_codes(mesh: LogicalMesh) -> AxisCodes:
    """Returns the codes of a mesh."""
    return AxisCodes(mesh)


@lru_cache(maxsize=4096)
def domain(mesh: LogicalMesh, shape: tuple[int, ...]) -> Domain:
    """Returns the domain of a shape on a mesh."""
    return Domain(axis_codes(mesh), shape)
