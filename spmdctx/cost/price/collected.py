"""The collectives of a bill while it is made."""

from __future__ import annotations

from typing import NamedTuple

from spmdctx.cost.price.assigned import Assigned
from spmdctx.ir.collective import Cause, Collective
from spmdctx.ir.graph import Op
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.topology import Topology


class Wanted(NamedTuple):
    """A collective that an op needs; `priced` is the kind that prices it if that is another one."""

    kind: str
    axes: AxisNames
    payload_bytes: int
    cause: Cause
    priced: str = ""


class Hiding(NamedTuple):
    """The share of a collective that hides behind compute, and the machine that prices it if that is not the plan's."""

    share: float = 0.0
    machine: Topology | None = None


class Collected:
    """The collectives in the order in which ops need them, the share of each that hides, the machine that priced it, and all such ops."""

    def __init__(self, assigned: Assigned) -> None:
        self._origins, self._mesh, self._topology = assigned.graph.origins, assigned.mesh, assigned.topology
        self.rows: list[Collective] = []
        self.ops: set[int] = set()
        self.shares: list[float] = []
        self.machines: list[Topology] = []

    @property
    def last(self) -> int:
        """The place of the last collective."""
        return len(self.rows) - 1

    def add(self, op: Op, wanted: Wanted, hiding: Hiding, repeats: int = 0) -> float:
        """Adds a collective of an op, as often as the op runs unless `repeats` says otherwise; returns its seconds per step."""
        machine, repeats = hiding.machine or self._topology, repeats or op.repeats
        kind, axes, payload, cause, priced = wanted
        time_s = collective_time_s(priced or kind, payload, axes, self._mesh, machine)
        self.machines.append(machine)
        self.ops.add(op.id)
        self.rows.append(Collective(kind, axes, payload, time_s, repeats, cause, self._origins[op.id].source))
        self.shares.append(hiding.share)
        return time_s * repeats

    def drop(self, places: set[int]) -> None:
        """Removes the collectives at some places."""
        kept = [place for place in range(len(self.rows)) if place not in places]
        self.rows, self.shares = [self.rows[place] for place in kept], [self.shares[place] for place in kept]
