"""XLA turns what a GPU gathers along a dimension that has others before it.

What XLA does: NCCL puts the parts of a gather one behind the other. So XLA gathers in a layout in which that dimension is the major one,
    and a copy at the end of the program turns what the program returns. Until then the gathered arrays of all copies are in memory.
Seen in: CUDA plugin 0.10.2, H100: updates of LLaMA2-70B on 8 devices, four float32[8192, 28672] gathered along dimension 1
    take 3.5 GiB. Of four or eight float32[4096, 4096] all are in memory together, of float32[1024, 512] half.
Switch: `Compiler.keeps_barriers` without `Compiler.runs_barriers_in_order`
Priced by: cost.price.moves, cost.memory.copies, search.problem.tables, search.problem.space
Written or prevented by: nothing
Checked by: tests/machine/xla/test_turning.py
"""

from __future__ import annotations

import math

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.ir.domain import domain
from spmdctx.ir.mesh import LogicalMesh, axes_of
from spmdctx.ir.sharding import TensorSharding
from spmdctx.machine.topology import Topology


def turned_bytes(shape: tuple[int, ...], item_bytes: int, source: TensorSharding, target: TensorSharding, mesh: LogicalMesh) -> int:
    """Returns the bytes on a device of what a program returns as `target` and gathers from `source`, if it is turned; else 0."""
    kept = frozenset(axes_of(target))
    sizes = [size // mesh.num_slices(names) for size, names in zip(shape, target, strict=True)]
    for dim, names in enumerate(source):
        is_gathered = any(mesh.sizes[name] > 1 and name not in kept for name in names)
        if is_gathered and math.prod(sizes[:dim]) > 1:
            return math.prod(sizes) * item_bytes
    return 0


def turned_s(
    shape: tuple[int, ...], item_bytes: int, source: TensorSharding, target: TensorSharding, mesh: LogicalMesh, topology: Topology
) -> float:
    """Returns the seconds of reading and writing what is turned (`turned_bytes`)."""
    if source == target or not topology.compiler.turns_gathers:
        return 0.0
    return 2 * turned_bytes(shape, item_bytes, source, target, mesh) / topology.memory_bytes_per_s


def turned_table(shape: tuple[int, ...], mesh: LogicalMesh, topology: Topology) -> FloatArray:
    """Returns `turned_s` from each sharding of a shape to each, for elements of one byte."""
    shardings = domain(mesh, shape).shardings
    return np.array([[turned_s(shape, 1, source, target, mesh, topology) for target in shardings] for source in shardings])
