"""Moves between groups of devices: the slowest pair of devices decides on the link."""

from dataclasses import replace

import pytest

from spmdctx.machine.presets import topology
from spmdctx.pipeline.stages.hops import hop_price

HOSTS = replace(
    topology("h100"), devices_per_host=8, latency_s=1e-6, link_bytes_per_s=4e11, network_latency_s=1e-5, network_bytes_per_s=5e10
)


@pytest.mark.parametrize(
    ("source", "target", "size", "crosses"),
    [(0, 1, 4, False), (1, 2, 4, True), (2, 1, 4, True), (0, 1, 8, True), (0, 3, 2, False), (3, 4, 2, True), (0, 1, 6, True)],
)
def test_a_move_that_leaves_a_host_takes_the_network(source, target, size, crosses):
    price = hop_price(source, target, size, HOSTS)
    assert price == ((1e-5, 1 / 5e10) if crosses else (1e-6, 1 / 4e11))
