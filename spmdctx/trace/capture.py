"""The user's function and arguments to one pure, flat program: leaves with their roles, a jaxpr, and the way back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jexc

from spmdctx.ir import Role

PartitionNames = tuple[str | tuple[str, ...] | None, ...]
"""Axis names per dimension, as Flax metadata gives them; None where a dimension is whole."""


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """One flat argument of the program; `shape` is global.

    `metadata` holds the partition names of Flax metadata (a pin), None where the leaf has none. `layerwise` marks a
    parameter that stays split in hybrid_parallel.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    donated: bool = False
    metadata: PartitionNames | None = None
    layerwise: bool = False


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """One flat result; `carried_from` is the index of the input whose next value it is, None where it is new."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    carried_from: int | None = None


@dataclass(frozen=True)
class Captured:
    """A traced step over flat leaves.

    `jaxpr` takes one variable per entry of `inputs` and gives one per entry of `outputs`; closed-over arrays are its
    consts. `structure` is what the step needs to flatten arguments and to rebuild results.
    """

    name: str
    jaxpr: jexc.ClosedJaxpr
    inputs: tuple[InputLeaf, ...]
    outputs: tuple[OutputLeaf, ...]
    structure: Hashable
    trace_s: float
    notes: tuple[str, ...] = ()

    @property
    def carried(self) -> tuple[tuple[int, int], ...]:
        """Pairs (output index, input index) of state that goes in and comes out."""
        return tuple((index, leaf.carried_from) for index, leaf in enumerate(self.outputs) if leaf.carried_from is not None)

    @property
    def in_avals(self) -> tuple[Any, ...]:
        """Abstract values of the inputs, weak types kept."""
        return tuple(self.jaxpr.in_avals)
