"""Completes the gradients that the micro-batches of a chunk have added up on each device alone: one reduction in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.pipeline.programs.slots import Holds, Slot, TaskProgram
from spmdctx.pipeline.schedule.tasks import Kind


class HeldSum(NamedTuple):
    """A sum of gradients that waits to be reduced: as an array, it has a leading dimension for the devices that add to it.

    Attributes:
        axes: over which it is partial; they split the leading dimension.
        dims: the sharding of the other dimensions.
        aval: the type of the complete sum.
        dtype: the type in which it is reduced.
    """

    axes: AxisNames
    dims: TensorSharding
    aval: Any
    dtype: Any

    def struct(self, mesh: LogicalMesh) -> jax.ShapeDtypeStruct:
        """Returns the type of the array."""
        return jax.ShapeDtypeStruct((math.prod(mesh.sizes[name] for name in self.axes), *self.aval.shape), self.aval.dtype)


def reduction_program(held: Mapping[int, HeldSum], mesh: LogicalMesh) -> TaskProgram:
    """Returns the program that reduces the sums of a chunk, which are given by the numbers of their leaves."""

    def run(*sums: Any) -> list[Any]:
        return [
            jax.lax.reduce_sum(value.astype(jnp.dtype(own.dtype)), (0,)).astype(own.aval.dtype)
            for value, own in zip(sums, held.values(), strict=True)
        ]

    jaxpr = jax.make_jaxpr(run)(*(own.struct(mesh) for own in held.values()))
    inputs, outputs = ([Slot(holds, leaf) for leaf in held] for holds in (Holds.SUM, Holds.TOTAL))
    return TaskProgram(Kind.WEIGHT, jaxpr, tuple(inputs), tuple(outputs))
