"""The seconds that what leaves a chunk takes to the stage of the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmdctx.machine.collectives import LinearPrice
from spmdctx.machine.topology import Topology
from spmdctx.pipeline.programs.slots import Holds
from spmdctx.pipeline.stages.plans import PlannedChunk
from spmdctx.pipeline.stages.sizes import slot_bytes

HopOf = Callable[[int, int], float]
"""Gives the seconds from one chunk to a chunk that reads its result."""


def hop_price(source: int, target: int, size: int, topology: Topology) -> LinearPrice:
    """Returns the price of a move over the bytes of one device, each of which sends its part to the device with its place.

    Args:
        source: the number of the group that sends; group g has the devices g * size to (g + 1) * size - 1.
        target: the number of the group that receives.
        size: devices of a group.
        topology: the machine; the slowest pair decides.
    """
    domain = topology.devices_per_host
    pairs = ((source * size + place, target * size + place) for place in range(size))
    if any(first // domain != last // domain for first, last in pairs):
        return LinearPrice(topology.network_latency_s, 1 / topology.network_bytes_per_s)
    return LinearPrice(topology.latency_s, 1 / topology.link_bytes_per_s)


def hops_of(chunks: Sequence[PlannedChunk], stage_of: Sequence[int], topology: Topology) -> HopOf:
    """Returns the seconds of moves between chunks on different stages, by the arrays that one hands to the other.

    Each device sends the part of an array that it holds; the link is the slowest between the devices of both stages.
    """
    size = chunks[0].mesh.num_devices
    sent = [(_bytes(chunk, Holds.LEAVING), _bytes(chunk, Holds.OF_ENTERING)) for chunk in chunks]

    def hop_s(chunk: int, reader: int) -> float:
        amount = sent[chunk][0 if reader > chunk else 1]
        price = hop_price(stage_of[chunk], stage_of[reader], size, topology)
        return price.fixed_s + amount * price.s_per_byte if amount else 0.0

    return hop_s


def _bytes(chunk: PlannedChunk, holds: Holds) -> int:
    return sum(slot_bytes(chunk, (holds,)).values())
