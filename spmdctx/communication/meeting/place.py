"""Where process 0 listens: at the job's address, and at all interfaces only where that address cannot be told."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping

from spmdctx.communication.clusters import Cluster
from spmdctx.communication.meeting.key import is_loopback
from spmdctx.errors import CommunicationError, ContextError

_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
"""Read by JAX too: where process 0 listens, for machines whose address is not that by which others reach them."""


_UNIX = "unix:"
_LONGEST_PATH = 100
"""Bytes of the path of a Unix socket; Linux takes 107, macOS 103."""


def new_service_address(environ: Mapping[str, str], cluster: Cluster) -> str:
    """Returns where process 0 has JAX's own service listen, which asks nobody who it is.

    On one machine that is a Unix socket in a new folder that only the user can enter. `forget_service_address` removes it.
    """
    if not is_loopback(cluster.address.rpartition(":")[0]) or _BIND in environ:
        return cluster.address
    try:
        folder = tempfile.mkdtemp(prefix="spmdctx-")
    except OSError:
        return cluster.address
    path = os.path.join(folder, "jax")
    if len(os.fsencode(path)) > _LONGEST_PATH:
        os.rmdir(folder)
        return cluster.address
    return _UNIX + path


def forget_service_address(service: str) -> None:
    """Removes a Unix socket's folder, once all processes have connected: nobody can connect any more."""
    if service.startswith(_UNIX):
        shutil.rmtree(os.path.dirname(service.removeprefix(_UNIX)), ignore_errors=True)


def is_in_reach(service: str) -> bool:
    """Returns whether this process sees the folder of a Unix socket; a container of its own may not."""
    return not service.startswith(_UNIX) or os.path.isdir(os.path.dirname(service.removeprefix(_UNIX)))


def bind_address(environ: Mapping[str, str], cluster: Cluster) -> str:
    """Returns "host:port" where process 0 listens; the host is "[::]" where the address is none of this machine's own.

    Raises:
        ContextError: JAX's variable for it holds no port.
    """
    if stated := environ.get(_BIND):
        if not stated.rpartition(":")[2].isdecimal():
            raise ContextError(f"{_BIND} is no address.", got=repr(stated[:200]), need="host:port")
        return stated
    host, _, port = cluster.address.rpartition(":")
    own = _own_addresses(host.strip("[]"))
    return cluster.address if len(own) > 1 else f"{_written(own[0]) if own else '[::]'}:{port}"


def open_listeners(environ: Mapping[str, str], cluster: Cluster, port: int | None = None) -> list[socket.socket]:
    """Opens process 0's sockets, at its own port or at another one (0 for any).

    Raises:
        CommunicationError: the port is in use.
    """
    host, _, own_port = bind_address(environ, cluster).rpartition(":")
    port = int(own_port) if port is None else port
    opened: list[socket.socket] = []
    try:
        for address in _own_addresses(host.strip("[]")) or [""]:
            opened.append(listen(port, address))
            port = opened[0].getsockname()[1]
    except OSError as error:
        for one in opened:
            one.close()
        raise CommunicationError(
            f"Process 0 cannot listen on port {port}.",
            where=f"process 0, told by {cluster.source}",
            got=os.strerror(error.errno) if error.errno else str(error),
            fix="SPMDCTX_ADDRESS=HOST:PORT with another port, the same for every process",
        ) from error
    return opened


def listen(port: int, host: str = "") -> socket.socket:
    """Opens a socket that listens on a port (0 for any) of one address, or of all by both IPv6 and IPv4 if possible."""
    if host:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _own_addresses(host: str) -> list[str]:
    """Returns which of this machine's addresses a host is, empty where it is none of them or all.

    Many machines give their own name a loopback address, which others cannot reach. So a name counts only with another one.
    """
    try:
        found = {str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return []
    own = sorted(one for one in found if _is_own(one))
    return own if is_loopback(host) or not all(map(is_loopback, own)) else []


def _is_own(address: str) -> bool:
    """Returns whether a socket can be bound there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return address not in ("0.0.0.0", "::")


def _written(address: str) -> str:
    return f"[{address}]" if ":" in address else address
