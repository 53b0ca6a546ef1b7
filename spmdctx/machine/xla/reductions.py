"""XLA on TPU reduce-scatters only slices that lie in its tiles, over axes in their order.

What XLA does: a TPU keeps a block in tiles of 8 by 128 words of 4 bytes, narrower elements packed. The compiler lays the dimension along
    the 128 lanes that fills them best, the last one where several do. Along that dimension it reduce-scatters only blocks of whole
    words on all lanes; over several axes only where the slices lie in the order in which the sum is spread over the devices; and over
    all chips of a slice not on a 3-D torus, nor on a square of more than four chips. Else it reduces whole tensors and slices them.
    On every backend only dots are scattered over some of their axes and reduced over the others.
Seen in: libtpu 0.0.42, v5e:2x4, v6e:2x4 and v5p:2x2x2: bfloat16 [768, 3072] over 8 devices becomes [96, 3072] by a reduce_scatter and
    [768, 384] by an all_reduce, [3072, 768] both [384, 768] and [3072, 96] by reduce_scatters; float32 [768, 384] by one too,
    [96, 16, 48] by none. A sum over the batch split by (a, b) is scattered into (a, b), not into (b, a). Over whole slices:
    reduce_scatters for v5e:2x4, 4x8, 8x16, v6e:2x2 and 4x8, all_reduces for v5e:4x4, 8x8, 16x16, v6e:4x4, 8x8, v5p:2x2x2, 2x2x4, 2x4x4
    and 4x4x4. Over v5p:2x2x1 it scatters, but combines nothing, and plans with these were no faster.
Switch: `Compiler.scatters_strictly`, `Compiler.scatters_over_all`
Priced by: machine.collectives, cost.price.reductions, cost.evaluate, search.problem.states, search.problem.space
Written or prevented by: lowering.rewrite.rewriter
Checked by: tests/machine/xla/test_reductions.py, tests/machine/test_torus.py, tests/machine/test_collectives.py,
    benchmarks/fidelity_plans.py
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import BoolArray, IntArray
from spmdctx.ir.graph import Op
from spmdctx.ir.mesh import LogicalMesh, local_shape
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.machine.topology import Topology

_LANES, _WORD_BYTES = 128, 4


def lanes_dim(block: Sequence[int]) -> int:
    """The dimension of a block that lies along the lanes."""
    return max(range(len(block)), key=lambda dim: (block[dim] / (-(-block[dim] // _LANES) * _LANES) if block[dim] else 0.0, dim))


@lru_cache(maxsize=65536)
def is_scattered(block: tuple[int, ...], dim: int, num_bytes: int) -> bool:
    """Whether blocks are reduce-scattered along a dimension; `num_bytes` of an element."""
    return dim != lanes_dim(block) or block[dim] * num_bytes % (_LANES * _WORD_BYTES) == 0


def are_scattered(blocks: IntArray, num_bytes: int) -> BoolArray:
    """The same of many blocks of one rank, along each of their dimensions. [blocks, dims]"""
    if not blocks.shape[1]:
        return np.ones(blocks.shape, dtype=bool)
    fills = blocks / np.maximum(-(-blocks // _LANES) * _LANES, 1)
    lanes = blocks.shape[1] - 1 - np.argmax(fills[:, ::-1], axis=1)
    found: BoolArray = (np.arange(blocks.shape[1]) != lanes[:, None]) | (blocks * num_bytes % (_LANES * _WORD_BYTES) == 0)
    return found


def in_order(scattered: AxisNames, partial: AxisNames) -> bool:
    """Whether a sum that is spread over the axes `partial` can be scattered over these; without any in `partial` it can."""
    return not partial or scattered == tuple([name for name in partial if name in scattered])


def scattered_by(
    shape: tuple[int, ...],
    num_bytes: int,
    partial: AxisNames,
    natural: TensorSharding,
    after: TensorSharding,
    mesh: LogicalMesh,
    topology: Topology,
) -> str:
    """The kind of collective by which a partial result in the sharding `natural` becomes one in `after`, a slice of it in one dimension.

    Args:
        shape: of the whole tensor.
        num_bytes: of an element while it is reduced.
        partial: the axes that the sum is spread over, in their order; empty for a sum of such sums.
        natural: the sharding before.
        after: the sharding after.
        mesh: the mesh.
        topology: the machine.
    """
    if not topology.compiler.scatters_strictly:
        return "reduce_scatter"
    dim, extra = next((dim, new[len(own) :]) for dim, (own, new) in enumerate(zip(natural, after, strict=True)) if own != new)
    fits = in_order(extra, partial) and is_scattered(local_shape(shape, after, mesh), dim, num_bytes)
    return "reduce_scatter" if fits else "all_reduce"


class ReductionPlan(NamedTuple):
    """How partial results become whole: axes to all-reduce, axes to reduce-scatter, and the sharding after both."""

    reduced: AxisNames
    scattered: AxisNames
    after: TensorSharding


def reduction_plan(op: Op, natural: TensorSharding, stored: TensorSharding, partial: AxisNames) -> ReductionPlan:
    """Scatters over the axes by which `stored` extends `natural` in one dimension, and all-reduces over the rest.

    Only sums are scattered; and only for dots does XLA scatter over some axes and reduce over others.
    """
    if op.rule.combiner == "add":
        for dim, (own, wanted) in enumerate(zip(natural, stored, strict=True)):
            extra = wanted[len(own) :]
            fits = extra and wanted[: len(own)] == own and set(extra) <= set(partial)
            if fits and (len(extra) == len(partial) or op.primitive == "dot_general"):
                after = (*natural[:dim], wanted, *natural[dim + 1 :])
                return ReductionPlan(tuple(name for name in partial if name not in extra), extra, after)
    return ReductionPlan(partial, (), natural)
