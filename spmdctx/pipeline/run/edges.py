"""The programs right before and after a chunk's tasks: one divides the batch into micro-batches, one joins what they have made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from spmdctx.gradients.keys import fold
from spmdctx.gradients.results import Fate
from spmdctx.pipeline.capture.loss import PipelinedLoss
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.run.compiled import CompiledChunk


class Part(NamedTuple):
    """What a micro-batch has of its own of one leaf: a part along `dim`, or for a key, where that is None, one derived from it."""

    slot: Slot
    dim: int | None
    is_key: bool


def parts_of(loss: PipelinedLoss, chunk: CompiledChunk, leaves: Sequence[int]) -> list[Part]:
    """Returns the leaves of which each micro-batch of a chunk has its own."""
    found = []
    for leaf in leaves:
        slot, dim = Slot(Holds.LEAF, leaf), loss.operands[leaf].batch_dim
        if slot in chunk.shardings and (dim is not None or leaf in loss.folded):
            found.append(Part(slot, dim, leaf in loss.folded))
    return found


def dividing(parts: Sequence[Part], num_micro: int, sums: Sequence[Any], places: Sequence[NamedSharding]) -> jax.stages.Wrapped:
    """Returns a jitted function of whole leaves: the parts of each, micro-batch by micro-batch, and then sums that are zero.

    Args:
        parts: for each leaf.
        num_micro: micro-batches.
        sums: the types of the sums.
        places: the sharding of each result.
    """

    def pipeline_begin(*whole: Any) -> list[Any]:
        found = []
        for part, leaf in zip(parts, whole, strict=True):
            for index in range(num_micro):
                # The elements number, number + count, ...: each device has its share of every micro-batch.
                own = leaf if part.dim is None else jax.lax.slice_in_dim(leaf, index, None, num_micro, part.dim)
                found.append(fold(own, np.uint32(index)) if part.is_key else own)
        return [*found, *(jnp.zeros(one.shape, one.dtype) for one in sums)]

    return jax.jit(pipeline_begin, out_shardings=list(places))


class Joint(NamedTuple):
    """How pieces become one result: their mean in a type, or one after the other along `dim`, as they were before `dividing`."""

    num_pieces: int
    dtype: Any
    dim: int | None = None


def joint_of(loss: PipelinedLoss, index: int) -> Joint | None:
    """Returns how the results of micro-batches become a result of the loss; None where the last one is it."""
    row = loss.rows[index]
    if row.fate is Fate.STACKED:
        assert row.dim is not None, "what is stacked has a batch dimension"
        return Joint(loss.num_micro, loss.types[index].dtype, row.dim)
    if row.carry is None and row.fate in (Fate.AVERAGED, Fate.REDUCED):
        return Joint(loss.num_micro, loss.types[index].dtype)
    return None


def joining(joints: Sequence[Joint], num_micro: int, places: Sequence[NamedSharding]) -> jax.stages.Wrapped:
    """Returns a jitted function of all pieces, those of each result after those of the one before.

    Beside the results it gives a number, which is there when they are, and which nobody can donate.
    """

    def pipeline_end(*pieces: Any) -> list[Any]:
        found, first = [], 0
        for joint in joints:
            own = pieces[first : first + joint.num_pieces]
            first += joint.num_pieces
            if joint.dim is None:
                found.append((sum(own[1:], start=own[0]) / num_micro).astype(joint.dtype))
            else:
                stacked, dim = jnp.stack(own, joint.dim + 1), joint.dim
                found.append(stacked.reshape((*stacked.shape[:dim], stacked.shape[dim] * len(own), *stacked.shape[dim + 2 :])))
        return [*found, jnp.zeros(())]

    return jax.jit(pipeline_end, out_shardings=list(places))
