"""Writes the peak of a step into its bill: the likely one, and the one that is safe to allow for."""

from __future__ import annotations

from collections.abc import Sequence

from spmdctx.cost.bill import Bill
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.memory.spread import safe_bytes


def set_peak(bill: Bill, alive: Sequence[int], topology: Topology) -> None:
    """Sets the profile of a bill whose arguments are known, and both ends of its peak."""
    bill.memory_profile, bill.memory_bytes = tuple(alive), max(alive, default=0)
    bill.safe_bytes = safe_bytes(bill.memory_bytes, bill.argument_bytes, topology.device)
