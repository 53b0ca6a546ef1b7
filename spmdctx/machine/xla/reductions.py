"""XLA on TPU reduce-scatters only slices that lie in its tiles, over axes in their order.

What XLA does: a TPU keeps a block in tiles of 8 by 128 words of 4 bytes, narrower elements packed. The compiler lays the dimension along
    the 128 lanes that fills them best, the last one if several do. Along that dimension it reduce-scatters only blocks of whole words on
    all lanes. Over several axes it does so only if the slices lie in the order in which the sum is spread over the devices. It does so over
    all chips of a slice neither on a 3-D torus nor on a square of more than four chips. Else it reduces whole tensors and slices them. On
    every backend, XLA scatters only dots over some of their axes and reduces them over the others, and only along dimensions that are not
    yet split: else it reduces them over all axes and slices them.
Seen in: libtpu 0.0.42, v5e:2x4, v6e:2x4 and v5p:2x2x2: bfloat16 [768, 3072] over 8 devices becomes [96, 3072] by a reduce_scatter and
    [768, 384] by an all_reduce, [3072, 768] both [384, 768] and [3072, 96] by reduce_scatters; float32 [768, 384] by one too,
    [96, 16, 48] by none. A sum over the batch split by (a, b) is scattered into (a, b), not into (b, a); so is a sum of three such sums,
    the gradient of a tied table (libtpu 0.0.42.1). Over whole slices: reduce_scatters for v5e:2x4, 4x8, 8x16, v6e:2x2 and 4x8,
    all_reduces for v5e:4x4, 8x8, 16x16, v6e:4x4, 8x8, v5p:2x2x2, 2x2x4, 2x4x4 and 4x4x4. Over v5p:2x2x1 it scatters, but combines
    nothing, and plans with these were no faster.
Switch: `Compiler.scatters_strictly`, `Compiler.scatters_over_all`
Priced by: machine.collectives, cost.price.reductions, cost.evaluate, search.problem.states, search.problem.space
Written or prevented by: lowering.rewrite.rewriter; search.whatif.axis_order takes the order that is scattered.
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
    """Returns the dimension of a block that lies along the lanes."""
    return max(range(len(block)), key=lambda dim: (block[dim] / (-(-block[dim] // _LANES) * _LANES) if block[dim] else 0.0, dim))


@lru_cache(maxsize=65536)
def is_scattered(block: tuple[int, ...], dim: int, num_bytes: int) -> bool:
    """Returns whether XLA reduce-scatters such blocks along a dimension; `num_bytes` is the size of an element."""
    return dim != lanes_dim(block) or block[dim] * num_bytes % (_LANES * _WORD_BYTES) == 0


def are_scattered(blocks: IntArray, num_bytes: int) -> BoolArray:
    """Returns `is_scattered` of many blocks of one rank, along each of their dimensions. [blocks, dims]"""
    if not blocks.shape[1]:
        return np.ones(blocks.shape, dtype=bool)
    fills = blocks / np.maximum(-(-blocks // _LANES) * _LANES, 1)
    lanes = blocks.shape[1] - 1 - np.argmax(fills[:, ::-1], axis=1)
    found: BoolArray = (np.arange(blocks.shape[1]) != lanes[:, None]) | (blocks * num_bytes % (_LANES * _WORD_BYTES) == 0)
    return found


def in_order(scattered: AxisNames, partial: AxisNames) -> bool:
    """Returns whether a sum that is spread over the axes `partial` can be scattered over `scattered`; if `partial` is empty, it can."""
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
    """Returns the kind of collective that reduces a partial result and leaves a slice of it in one dimension.

    Args:
        shape: The shape of the whole tensor.
        num_bytes: The size of an element while it is reduced.
        partial: The axes over which the sum is spread, in their order; empty for a sum of such sums.
        natural: The sharding before.
        after: The sharding after, which splits one dimension further.
        mesh: The mesh.
        topology: The machine.
    """
    if not topology.compiler.scatters_strictly:
        return "reduce_scatter"
    dim, extra = next((dim, new[len(own) :]) for dim, (own, new) in enumerate(zip(natural, after, strict=True)) if own != new)
    fits = in_order(extra, partial) and is_scattered(local_shape(shape, after, mesh), dim, num_bytes)
    return "reduce_scatter" if fits else "all_reduce"


class ReductionPlan(NamedTuple):
    """The reduction of a partial result: axes to all-reduce, axes to reduce-scatter, and the sharding after both."""

    reduced: AxisNames
    scattered: AxisNames
    after: TensorSharding


def reduction_plan(op: Op, natural: TensorSharding, stored: TensorSharding, partial: AxisNames) -> ReductionPlan:
    """Returns a plan that scatters over the axes by which `stored` extends `natural` in one dimension, and all-reduces over the rest.

    Only sums are scattered. XLA scatters over some axes and reduces over others only for dots, along dimensions that are not split.
    """
    if op.rule.combiner == "add":
        for dim, (own, wanted) in enumerate(zip(natural, stored, strict=True)):
            extra = wanted[len(own) :]
            fits = extra and wanted[: len(own)] == own and set(extra) <= set(partial)
            if fits and (len(extra) == len(partial) or (op.primitive == "dot_general" and not own)):
                after = (*natural[:dim], wanted, *natural[dim + 1 :])
                return ReductionPlan(tuple(name for name in partial if name not in extra), extra, after)
    return ReductionPlan(partial, (), natural)
