"""The bill of an assignment: its collectives, moves, seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from spmdctx.cost.memory.early_updates import EarlyUpdate
from spmdctx.cost.memory.reserved import ReservedShare
from spmdctx.ir.collective import Collective
from spmdctx.ir.sharding import TensorSharding


class Moved(NamedTuple):
    """A value that changes its sharding on the way to or from an op, and the seconds per step that the move takes."""

    value: int
    source: TensorSharding
    target: TensorSharding
    op: int
    time_s: float


class Crossed(NamedTuple):
    """A sum that is reduced whole because its slices, `kept` by all readers, do not lie in the order in which devices add it up.

    In the order `wanted` it would be scattered.
    """

    value: int
    kept: TensorSharding
    wanted: TensorSharding


@dataclass(slots=True)
class Bill:
    """All costs of an assignment in one step, per device.

    `shares` has the share of each collective that hides behind compute, `memory_profile` the bytes alive at each op, of which
    `argument_bytes` are the step's arguments; `safe_bytes` allows for what compilers add to the rest. XLA reserves memory for results
    before they are made, by which the peak is higher by `reserved_bytes`; `reserved` tells how much, in pieces of the step
    (`cost.memory.reserved`). `early` has the updates that the bill counts as run right behind their gradients, `crossed` the sums that
    another order of axes would make cheaper.
    """

    collectives: list[Collective] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)
    crossed: tuple[Crossed, ...] = ()
    compute_s: float = 0.0
    memory_bytes: int = 0
    argument_bytes: int = 0
    safe_bytes: int = 0
    reserved_bytes: int = 0
    reserved: tuple[ReservedShare, ...] = ()
    memory_profile: tuple[int, ...] = ()
    early: tuple[EarlyUpdate, ...] = ()
    hidden_communication_s: float = 0.0
    flops: float = 0.0
    split_flops: float = 0.0

    @property
    def communication_s(self) -> float:
        """The seconds of all collectives of a step, one after the other."""
        return sum(row.time_s * row.repeats for row in self.collectives)

    @property
    def exposed_communication_s(self) -> float:
        """The seconds that are left when weight gathers and gradient reductions hide behind matrix products as far as they can."""
        return self.communication_s - self.hidden_communication_s

    @property
    def total_s(self) -> float:
        """The seconds of a step: compute, and the communication that does not hide behind it."""
        return self.compute_s + self.exposed_communication_s
