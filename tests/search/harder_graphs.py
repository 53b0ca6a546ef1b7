"""Random graphs of what hides most: partial results on long ways, values of many readers, types, cubes, sums of loops, odd sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from spmdctx.ir.graph import LITERAL
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.topology import Preferences, Topology, as_asked
from spmdctx.search.setup.request import Setup
from tests.search.random_graphs import RandomStep, Walk, fused, random_pins

SIZES = (2, 3, 4, 6, 8, 12, 16, 48, 64, 256)

MESHES = ((2,), (3,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 3), (4, 4), (2, 2, 2))


class Case(NamedTuple):
    """A step, on a mesh of a machine, and what the user pinned."""

    made: RandomStep
    setup: Setup
    machine: Topology


def harder_case(seed: int, num_ops: tuple[int, ...] = (5, 8, 8, 11)) -> Case:
    """A step of about so many ops, in every other case as the compiler fuses it; three in ten with pins."""
    rng = random.Random(seed * 7 + 1)
    made, mesh = _Harder(seed, rng.choice(num_ops)).run(), harder_mesh(seed)
    made = fused(made) if rng.random() < 0.5 else made
    setup = random_pins(made, mesh, seed) if rng.random() < 0.3 else Setup(mesh)
    return Case(made, setup, harder_machine(seed))


def harder_machine(seed: int) -> Topology:
    """Any of the known machines, its small tensors worth moving, with any of the habits that compilers have."""
    choose = random.Random(seed).choice
    known = PRESETS[choose(tuple(PRESETS))]
    machine = replace(
        known,
        device=known.device if known.device == "cpu" else f"random {known.device}",
        latency_s=choose((1e-9, 1e-8, 1e-6)),
        network_latency_s=choose((1e-8, 1e-6)),
        network_bytes_per_s=choose((known.network_bytes_per_s, 1e9)),
        peak_flops_per_s=choose((1e11, 1e12, 1e13)),
        memory_bytes_per_s=choose((2e10, 1e12)),
        link_bytes_per_s=choose((5e10, 4.5e11, 5e12)),
        devices_per_host=choose((2, 4, 8, 256)),
        torus_dims=choose((1, 2)) if known.torus_dims > 1 else 1,
        ring_side=choose((2, 4, 16)) if known.torus_dims > 1 else 1,
        merges_partial_sums=choose((known.merges_partial_sums, True)),
        scatters_over_all=choose((False, True)),
        scatters_strictly=choose((known.scatters_strictly, True)),
        sinks_slices=choose((False, True)),
        narrows_matrix_operands=choose((False, True)),
        scratch_bytes=0,
        gather_overlap=choose((0.0, 0.5)),
        reduction_overlap=choose((0.0, 0.7)),
        combines_reductions=choose((False, True)),
    )
    return as_asked(machine, Preferences(choose((True, True, True, False)), choose((False, True))))


def harder_mesh(seed: int) -> LogicalMesh:
    """Two to sixteen devices."""
    return LogicalMesh.of(random.Random(seed + 1).choice(MESHES))


class _Harder(Walk):
    def _moves(self) -> list[Callable[[], None]]:
        return [
            *super()._moves(),
            self._handed_on,
            self._handed_on,
            self._cast,
            self._scaled,
            self._cube,
            self._cube,
            self._join,
            self._cut,
            self._apart,
            self._best,
            self._cumulate,
            self._many_readers,
        ]

    def _size(self) -> int:
        return self.random.choice(SIZES)

    def _matrix(self) -> int:
        """One of the newest matrices, mostly; now and then an old one again."""
        return self.random.choice(self.matrices[-3:] if self.random.random() < 0.6 else self.matrices)

    def _changed(self, value: int) -> int:
        """Nothing that a partial result could not pass through in principle."""
        make = self.make
        how = self.random.randrange(5)
        if how == 0:
            return make.op("mul", value, LITERAL, shape=make.shape(value))
        if how == 1:
            return make.same("neg", value)
        if how == 2:
            return self._other_type(value)
        if how == 3 and len(make.shape(value)) == 2:
            return make.transpose(make.transpose(value))
        return value

    def _other_type(self, value: int) -> int:
        """The value in the other type."""
        dtype = "bfloat16" if self.make.values[value].dtype == "float32" else "float32"
        return self.make.op("convert_element_type", value, shape=self.make.shape(value), dtype=dtype, new_dtype=dtype)

    def _handed_on(self) -> None:
        """A sum of two to four products, one of which may be changed first, and which may be changed itself."""
        left = self._matrix()
        rows, inner = self.make.shape(left)
        columns = self._size()
        total = self._changed(self.make.dot(left, self._parameter(inner, columns)))
        for _ in range(self.random.choice((1, 1, 2, 3))):
            size = self.random.choice((inner, self._size()))
            term = self._changed(self.make.dot(self._parameter(rows, size), self._parameter(size, columns)))
            total = self.make.same(self.random.choice(("add", "add_any")), total, term)
            if self.random.random() < 0.2:
                self.matrices.append(total)
        self.matrices.append(self._changed(total))

    def _cast(self) -> None:
        self.matrices.append(self._other_type(self._matrix()))

    def _scaled(self) -> None:
        value = self._matrix()
        self.matrices.append(self.make.op("mul", value, LITERAL, shape=self.make.shape(value)))

    def _cube(self) -> None:
        """A matrix as a cube, turned, multiplied in batches, and as a matrix again."""
        make, value = self.make, self._matrix()
        rows, columns = make.shape(value)
        parts = self.random.choice([part for part in (1, 2, 3, 4) if columns % part == 0])
        cube = make.reshape(value, rows, parts, columns // parts)
        order = self.random.choice(((0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 1, 0)))
        shape = tuple(make.shape(cube)[dim] for dim in order)
        cube = make.op("transpose", cube, shape=shape, permutation=order)
        if self.random.random() < 0.6:
            dims = (((2,), (1,)), ((0,), (0,)))
            other = self._parameter(shape[0], shape[2], self._size())
            shape = (*shape[:2], make.shape(other)[2])
            cube = make.op("dot_general", cube, other, shape=shape, dimension_numbers=dims)
        if self.random.random() < 0.5:
            self.matrices.append(make.reduce(self.random.choice(("reduce_sum", "reduce_max")), cube, self.random.randrange(3)))
        else:
            self.matrices.append(make.reshape(cube, shape[0] * shape[1], shape[2]))

    def _join(self) -> None:
        first = self._matrix()
        rows, columns = self.make.shape(first)
        alike = [value for value in self.matrices if self.make.shape(value)[1] == columns]
        second = self.random.choice(alike)
        shape = (rows + self.make.shape(second)[0], columns)
        self.matrices.append(self.make.op("concatenate", first, second, shape=shape, dimension=0))

    def _cut(self) -> None:
        value = self._matrix()
        rows, columns = self.make.shape(value)
        if rows % 2 == 0:
            more = {"start_indices": (0, 0), "limit_indices": (rows // 2, columns), "strides": None}
            self.matrices.append(self.make.op("slice", value, shape=(rows // 2, columns), **more))

    def _apart(self) -> None:
        """An op of two results."""
        value = self._matrix()
        rows, columns = self.make.shape(value)
        if columns % 2 == 0:
            halves = ((rows, columns // 2),) * 2
            self.matrices += self.make.several("split", value, shapes=halves, sizes=(columns // 2,) * 2, axis=1)

    def _best(self) -> None:
        value, axis = self._matrix(), self.random.randrange(2)
        shape = self.make.shape(value)
        self.make.op("argmax", value, shape=(shape[1 - axis],), dtype="int32", axes=(axis,), index_dtype="int32")

    def _cumulate(self) -> None:
        value = self._matrix()
        self.matrices.append(self.make.op("cumsum", value, shape=self.make.shape(value), axis=self.random.randrange(2), reverse=False))

    def _many_readers(self) -> None:
        """One value read by products, by an element-wise op, turned, and by a product with itself."""
        make, value = self.make, self._matrix()
        rows, inner = make.shape(value)
        for _ in range(self.random.choice((1, 2, 3))):
            how = self.random.randrange(4)
            if how == 0:
                self.matrices.append(make.dot(value, self._parameter(inner, self._size())))
            elif how == 1:
                self.matrices.append(make.dot(self._parameter(rows, self._size()), value, contract=(0, 0)))
            elif how == 2:
                self.matrices.append(make.dot(value, value, contract=(1, 1)))
            else:
                self.matrices.append(make.same("tanh", value))

    def _close(self) -> None:
        """Every other loop adds to what it carries, as that of micro-batches does."""
        if self.outer is not None and self.random.random() < 0.5:
            alike = [value for value in self.matrices[1:] if self.make.shape(value) == self.make.shape(self.carried)]
            if alike:
                self.matrices.append(self.make.same("add", self.carried, alike[-1]))
        super()._close()
