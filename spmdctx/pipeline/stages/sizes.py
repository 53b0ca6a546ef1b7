"""The bytes that a planned chunk holds on one device."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import TensorSharding
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.stages.plans import PlannedChunk


def device_bytes(aval: Any, sharding: TensorSharding, mesh: LogicalMesh) -> int:
    """Returns the bytes of an array on one device."""
    ways = math.prod(mesh.num_slices(names) for names in sharding)
    return int(math.prod(aval.shape) * aval.dtype.itemsize) // ways


def slot_bytes(chunk: PlannedChunk, holds: Collection[Holds]) -> dict[Slot, int]:
    """Returns the bytes on one device of a chunk's arrays that hold some things; of one micro-batch, where each has its own."""
    found: dict[Slot, int] = {}
    for task in chunk.tasks.values():
        avals, shardings = task.program.avals, task.shardings
        found.update({slot: device_bytes(aval, shardings[slot], chunk.mesh) for slot, aval in avals.items() if slot.holds in holds})
    return found
