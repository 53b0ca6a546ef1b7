"""How long a collective takes on the links of a TPU slice or of GPU hosts: rings, bandwidth by links and nothing else.

With payload `P` (operand; an all-gather's result), `n` chips and link bandwidth `B` of one direction
(jax-ml.github.io/scaling-book/sharding and /tpus, cloud.google.com/tpu/docs/system-architecture-tpu-vm):

    all_gather, reduce_scatter   P (n - 1) / n / (r B)   one ring through the group, both ways: r = 2, an open line r = 1
    all_reduce                   2 P (n - 1) / n / (l B) all directions of the group at once: l = 2 per closed one, 1 per open one
    all_to_all                   P s / 4 / (w B)         half of it crosses the middle of the longest side s; w = 2 if closed, else 1
    collective_permute           P / B

plus a microsecond per hop. A direction is closed (wraps around) on v4 and v5p when every side of the slice is a multiple of 4, on
v5e and v6e when the side is 16. Nothing is fitted to any compiled program or plan.

GPUs of one host reach each other at `B` of NVLink each way, so that every ring has r = 1 and l = 1. A group over several hosts first
reduces inside of each host, last gathers there, and moves what one GPU of a host has left over that GPU's part of the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HOP_S = 1e-6
_LINK_BYTES_PER_S = {"v5e": 45e9, "v5p": 90e9, "v6e": 90e9}


@dataclass(frozen=True)
class Slice:
    """A slice of chips: its generation ("v5e"), and the coordinates of the program's devices, a row per device."""

    generation: str
    coordinates: NDArray[np.int64]

    @property
    def link_bytes_per_s(self) -> float:
        """One link, one direction."""
        return _LINK_BYTES_PER_S[self.generation]

    def is_closed(self, direction: int) -> bool:
        """Whether the chips along a direction form a ring."""
        sides = np.ptp(self.coordinates, axis=0) + 1
        if self.generation in ("v5e", "v6e"):
            return bool(sides[direction] == 16)
        return bool((sides % 4 == 0).all())


@dataclass(frozen=True)
class Hosts:
    """GPUs in hosts of equal size, numbered host by host.

    `local_bytes_per_s` is NVLink's for one GPU and direction, `network_bytes_per_s` that of one GPU's part of the network.
    """

    generation: str
    num_devices: int
    per_host: int
    local_bytes_per_s: float
    network_bytes_per_s: float

    @property
    def coordinates(self) -> NDArray[np.int64]:
        """The host of each device and its place there, a row per device."""
        numbers = np.arange(self.num_devices)
        return np.stack([numbers // self.per_host, numbers % self.per_host], axis=1)


H100_HOSTS = Hosts("h100", 8, 8, 450e9, 50e9)
"""One DGX H100 (NVIDIA's data sheet: NVLink 900 GB/s both ways, one 400 Gb/s ConnectX-7 per GPU)."""


def slice_of(topology: str, devices: Sequence[object]) -> Slice:
    """The slice that `topology` ("v5p:2x2x2") names, its devices in the program's order."""
    rows = [tuple(device.coords) for device in devices]  # type: ignore[attr-defined]  # TPU devices have it; jax.Device does not say so
    return Slice(topology.split(":")[0], np.array(rows, dtype=np.int64))


def collective_s(kind: str, payload_bytes: float, groups: NDArray[np.int64], chips: Slice | Hosts) -> float:
    """Seconds of one collective; `groups` has a row of device numbers per group, all alike, and the slowest one counts."""
    size = groups.shape[1]
    if size < 2 or not payload_bytes:
        return 0.0
    if isinstance(chips, Hosts):
        members = [Counter(member // chips.per_host for member in group.tolist()) for group in groups]
        return max(_on_hosts_s(kind, payload_bytes, own, chips) for own in members)
    if kind == "collective_permute":
        return HOP_S + payload_bytes / chips.link_bytes_per_s
    return max(_group_s(kind, payload_bytes, box, size, chips) for box in _boxes(groups, chips))


def _on_hosts_s(kind: str, payload_bytes: float, members: Counter[int], chips: Hosts) -> float:
    """Seconds of a collective among some GPUs, of which `members` counts those of each host."""
    hosts, local = len(members), max(members.values())
    if kind == "collective_permute":
        return HOP_S + payload_bytes / (chips.network_bytes_per_s if hosts > 1 else chips.local_bytes_per_s)
    if kind == "all_to_all":
        size = hosts * local
        inside, outside = payload_bytes * (local - 1) / size, payload_bytes * (hosts - 1) * local / size
    else:
        inside, outside = payload_bytes * (local - 1) / local, payload_bytes / local * (hosts - 1) / hosts
    times = 2 if kind == "all_reduce" else 1
    steps = times * ((local - 1) + (hosts - 1))
    return steps * HOP_S + times * (inside / chips.local_bytes_per_s + outside / chips.network_bytes_per_s)


def _boxes(groups: NDArray[np.int64], chips: Slice) -> list[tuple[int, ...]]:
    """Sides of the groups' bounding boxes, each different one once."""
    spans = np.ptp(chips.coordinates[groups], axis=1) + 1
    return sorted({tuple(int(side) for side in row) for row in spans})


def _group_s(kind: str, payload_bytes: float, box: tuple[int, ...], size: int, chips: Slice) -> float:
    spanned = [direction for direction, side in enumerate(box) if side > 1]
    # A direction closes only for a group that fills it.
    sides = np.ptp(chips.coordinates, axis=0) + 1
    closed = {direction: chips.is_closed(direction) and box[direction] == sides[direction] for direction in spanned}
    share = payload_bytes * (size - 1) / size
    if kind == "all_to_all":
        longest = max(spanned, key=lambda direction: box[direction] / (2 if closed[direction] else 1))
        links = 2 if closed[longest] else 1
        return box[longest] * HOP_S + payload_bytes * box[longest] / 4 / links / chips.link_bytes_per_s
    if kind == "all_reduce":
        links = sum(2 if closed[direction] else 1 for direction in spanned)
        hops = 2 * sum(box[direction] - 1 for direction in spanned)
        return hops * HOP_S + 2 * share / links / chips.link_bytes_per_s
    links = 2 if len(spanned) > 1 or closed[spanned[0]] else 1
    return (size - 1) * HOP_S + share / links / chips.link_bytes_per_s
