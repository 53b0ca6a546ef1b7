"""XLA makes one collective of many reductions of gradients, so that none pays a latency of its own."""

from __future__ import annotations

from spmdctx.machine.topology import Topology, without_latency


def reduction_machine(is_terminal: bool, topology: Topology) -> Topology:
    """Returns the machine by which a reduction is priced; those of terminal values are combined where the compiler does so."""
    return without_latency(topology) if is_terminal and topology.compiler.combines_reductions else topology
