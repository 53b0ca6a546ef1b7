"""A traced step with its graph, which planning reads and lowering replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.extend.core as jexc

from spmdctx.ir.collective import Collective
from spmdctx.ir.graph import Graph, Mark
from spmdctx.ir.sharding import AxisNames

BY_CONSTRAINT = "a sharding constraint"


class UserPin(NamedTuple):
    """A sharding that the user's own code fixes (a constraint, a nested jit's shardings, metadata).

    `mesh_axes` are the names and sizes of the mesh it was written for; a dimension that is None is left free. `origin` names its source.
    """

    value: int
    mesh_axes: tuple[tuple[str, int], ...]
    dims: tuple[AxisNames | None, ...]
    origin: str = BY_CONSTRAINT


class LossOperand(NamedTuple):
    """A value that enters a call of `value_and_grad`, by the number of the call and of its leaf, or the loss itself (`LOSS_VALUE`).

    `mapped` holds the dimensions of the value that vmaps around the call take away, the innermost first.
    """

    call: int
    leaf: int
    mapped: tuple[int, ...]
    value: int


class ManualRegion(NamedTuple):
    """A `shard_map`: the op that stands for it, its specs per operand and result, and the collectives inside.

    `body` is the program of one device, run `repeats` times. `is_loss` marks a region that `spmdctx.value_and_grad` has made;
    others are the user's.
    """

    op: int
    mesh_axes: tuple[tuple[str, int], ...]
    operands: tuple[tuple[AxisNames, ...], ...]
    results: tuple[tuple[AxisNames, ...], ...]
    collectives: tuple[Collective, ...]
    body: Program
    repeats: int
    is_loss: bool


@dataclass(frozen=True)
class Program:
    """A graph with the jaxpr it was built from.

    `op_of_site` maps each equation and body boundary, in the order in which `trace.build.control_flow` meets them, to its op id, -1 where
    the op is dead; equal equations of one body are one op. `scopes` numbers the computation (top level, loop body, remat body) that
    each op belongs to. `from_literals` holds the values that depend on no input, and so cost nothing to make in any sharding; `region_ops`
    the ops inside `shard()` regions. Where there are losses, `divisors` tells by which numbers ops divide.
    """

    graph: Graph
    jaxpr: jexc.ClosedJaxpr
    op_of_site: tuple[int, ...]
    scopes: tuple[int, ...]
    marks: tuple[Mark, ...]
    user_pins: tuple[UserPin, ...]
    manual: tuple[ManualRegion, ...]
    from_literals: frozenset[int]
    region_ops: frozenset[int]
    loss_operands: tuple[LossOperand, ...] = ()
    divisors: Mapping[int, float] = field(default_factory=dict)
