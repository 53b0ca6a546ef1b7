"""Lets processes with CPU devices exchange arrays outside of programs, as the stages of a pipeline do; other devices can by themselves."""

from __future__ import annotations

import os
import socket

import jax

from spmdctx.communication.clusters import Cluster, ports_of
from spmdctx.communication.meeting.key import is_loopback

_ADDRESS, _TRANSPORT = "jax_cross_host_transfer_socket_address", "jax_cross_host_transport_addresses"
_THREADS = "NPROC"
"""The variable by which XLA's CPU client learns how many threads it may have."""
_MOST_WAITING = 16
"""Threads at least: in a pool as small as the machine, programs that wait for another process keep back what that one waits for."""


def enable_transfers(cluster: Cluster) -> None:
    """Tells JAX where this process accepts arrays, before it starts its devices; the port is opened when the first array is moved.

    On one machine that is a port of the loopback interface.
    """
    if cluster.num_processes < 2:
        return
    os.environ.setdefault(_THREADS, str(max(_MOST_WAITING, os.cpu_count() or 1)))
    host = _own_host(cluster)
    if host is None or jax.config.read(_ADDRESS):
        return
    port = next((port for port in ports_of(cluster) if _is_free(host, port)), None)
    if port is not None:
        jax.config.update(_ADDRESS, f"{_written(host)}:{port}")
        jax.config.update(_TRANSPORT, f"{_written(host)}:0")


def can_transfer() -> bool:
    """Returns whether JAX was told where this process accepts arrays."""
    return bool(jax.config.read(_ADDRESS))


def _own_host(cluster: Cluster) -> str | None:
    """Returns the address from which this machine reaches process 0, None where no other machine could use it."""
    host, _, port = cluster.address.rpartition(":")
    host = host.strip("[]")
    if is_loopback(host):
        return "::1" if ":" in host else "127.0.0.1"
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if is_loopback(own) else own


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, port))
    except OSError:
        return False
    return True


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host
