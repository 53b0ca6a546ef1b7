"""The latency-bandwidth price of one collective over mesh axes.

With payload `P`, group size `n` and bandwidth `B` (Thakur, Rabenseifner, Gropp 2005; jax-ml.github.io/scaling-book/sharding):

    all_gather, reduce_scatter    P (n - 1) / n / B
    all_reduce                    2 P (n - 1) / n / B
    all_to_all                    P (n - 1) / n / B on a switch, P s / 4 / B over the longest side s of a group on a torus
    collective_permute            P / B of one link

On a torus an all_reduce uses every direction that its group spans at once, two links of a closed one and one of an open one.
The other kinds run on one ring through the group, both ways: on two links, or on one if the group is an open line. A group that
leaves its fast domain (host or slice) communicates in two phases: inside the domains, and across them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from spmdctx.errors import message
from spmdctx.ir.collective import COLLECTIVE_KINDS
from spmdctx.ir.mesh import AnyOrder, LogicalMesh
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.topology import Interconnect, Topology
from spmdctx.machine.torus import Span, scatters_over_slice, spans_of


class LinearPrice(NamedTuple):
    """A price as a line over the payload: `fixed_s + payload_bytes * s_per_byte`."""

    fixed_s: float
    s_per_byte: float


class Group(NamedTuple):
    """The size of a group of devices: `local` devices in each of so many fast `domains`."""

    local: int
    domains: int


def collective_time_s(kind: str, payload_bytes: int, axes: AxisNames, mesh: LogicalMesh, topology: Topology) -> float:
    """Returns the seconds of one collective of `kind` over `axes`; the payload is counted as in `ir.collective.Collective`."""
    fixed_s, s_per_byte = collective_price(kind, axes, mesh, topology)
    return fixed_s + payload_bytes * s_per_byte


@lru_cache(maxsize=4096)
def collective_price(kind: str, axes: AxisNames, mesh: LogicalMesh, topology: Topology) -> LinearPrice:
    """Returns the price of a collective as a line over its payload."""
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(message(f"There is no collective called {kind!r}.", need=", ".join(COLLECTIVE_KINDS)))
    if isinstance(mesh, AnyOrder):
        lines = [collective_price(kind, axes, order, topology) for order in mesh.orders]
        return LinearPrice(*map(min, zip(*lines, strict=True)))
    group = group_of(axes, mesh, topology.devices_per_host)
    if group.local * group.domains == 1:
        return LinearPrice(0.0, 0.0)
    if kind == "reduce_scatter" and group == (mesh.num_devices, 1) and not topology.compiler.scatters_over_all:
        kind = kind if scatters_over_slice(mesh.num_devices, topology.torus_dims) else "all_reduce"
    inside = _fast_price(kind, group.local, axes, mesh, topology)
    across = _network_price(kind, group, topology)
    return LinearPrice(inside.fixed_s + across.fixed_s, inside.s_per_byte + across.s_per_byte)


def group_of(axes: AxisNames, mesh: LogicalMesh, devices_per_host: int) -> Group:
    """Splits the group of `axes` at the fast domain's border; the last mesh axis runs over neighbours."""
    local = domains = stride = 1
    for name, size in reversed(mesh.axes):
        if name in axes:
            inside = max(1, min(size, devices_per_host // stride))
            local *= inside
            domains *= -(-size // inside)
        stride *= size
    return Group(local, domains)


def _fast_price(kind: str, size: int, axes: AxisNames, mesh: LogicalMesh, topology: Topology) -> LinearPrice:
    if size == 1:
        return LinearPrice(0.0, 0.0)
    if topology.interconnect is Interconnect.TORUS:
        return _torus_price(kind, size, spans_of(axes, mesh, topology), topology)
    return _ring_price(kind, size, math.ceil(math.log2(size)), topology.latency_s, topology.link_bytes_per_s)


def _torus_price(kind: str, size: int, spans: tuple[Span, ...], topology: Topology) -> LinearPrice:
    link = topology.link_bytes_per_s
    if kind == "collective_permute":
        return LinearPrice(topology.latency_s, 1 / link)
    if kind == "all_to_all":
        # Half of the payload crosses the middle of the longest side.
        worst = max(spans, key=lambda span: span.side / (2 if span.is_closed else 1))
        return LinearPrice(worst.side * topology.latency_s, worst.side / 4 / (link * (2 if worst.is_closed else 1)))
    if kind == "all_reduce":
        links = sum(2 if span.is_closed else 1 for span in spans)
        return _ring_price(kind, size, sum(span.side - 1 for span in spans), topology.latency_s, links * link)
    links = 2 if len(spans) > 1 or spans[0].is_closed else 1
    return _ring_price(kind, size, size - 1, topology.latency_s, links * link)


def _network_price(kind: str, group: Group, topology: Topology) -> LinearPrice:
    """Prices the phase across domains, in which each device carries its share of what its domain holds."""
    if group.domains == 1:
        return LinearPrice(0.0, 0.0)
    steps = math.ceil(math.log2(group.domains))
    shared = 1 if kind in ("all_to_all", "collective_permute") else group.local
    return _ring_price(kind, group.domains, steps, topology.network_latency_s, shared * topology.network_bytes_per_s)


def _ring_price(kind: str, size: int, steps: int, latency_s: float, bytes_per_s: float) -> LinearPrice:
    if kind == "collective_permute":
        return LinearPrice(latency_s, 1 / bytes_per_s)
    passes = 2 if kind == "all_reduce" else 1
    return LinearPrice(passes * steps * latency_s, passes * (size - 1) / size / bytes_per_s)
