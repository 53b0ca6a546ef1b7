"""Lets orbax write arrays that lie on devices of some processes only, as those of a pipeline's stages do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

_NO_REPLICA = 1 << 30
"""The number of a replica that writes nothing: orbax writes those from 0 on."""


class _Data(NamedTuple):
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _NoShard:
    """Stands for a shard where a process has none, so that orbax knows the shape of shards."""

    data: _Data
    index: tuple[slice, ...]
    replica_id: int = _NO_REPLICA


class _Parts:
    """An array of the job, of which this process has all shards or none; orbax takes an array of either kind for the process's own."""

    def __init__(self, array: jax.Array) -> None:
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim
        self.size, self.nbytes, self.itemsize = array.size, array.nbytes, array.dtype.itemsize
        self.sharding = array.sharding
        none = _NoShard(_Data(array.sharding.shard_shape(array.shape)), tuple(slice(0, size) for size in array.shape))
        self.addressable_shards: Sequence[Any] = array.addressable_shards or [none]


class _Arrays(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]  # orbax has no types
    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """Begins to write this process's shards; process 0 describes every array."""
        parts = [_Parts(value) if value.is_fully_addressable or not value.addressable_shards else value for value in values]
        found: Sequence[Any] = await super().serialize(parts, infos, args)
        return found


def with_parts() -> Any:
    """Returns orbax's handlers of arrays for a job of several processes."""
    return ocp.type_handlers.create_type_handler_registry((np.ndarray, ocp.type_handlers.NumpyHandler()), (jax.Array, _Arrays()))
