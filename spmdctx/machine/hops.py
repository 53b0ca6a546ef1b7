"""The price of moving an array from one group of devices to another one of the same size."""

from __future__ import annotations

from spmdctx.machine.collectives import LinearPrice
from spmdctx.machine.topology import Topology


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
