"""The meeting of a job's processes before JAX connects them, which names missing processes; JAX would abort without a word.

Process 0 listens at the job's address. The others send it their numbers and wait for its answer. Then JAX takes over the port.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from spmdctx.communication.clusters import Cluster
from spmdctx.errors import CommunicationError

_GO = b"go\n"
_KEPT_BYTES = 64
_RETRY_S = 0.1
_HELLO_S = 5.0
"""Seconds in which a process that has connected must send its number."""


def meet(cluster: Cluster, timeout_s: float) -> None:
    """Waits until all processes have connected.

    Raises:
        CommunicationError: some do not connect in time, two have the same number, they were told different numbers of processes, or
            the port of process 0 is in use.
    """
    if cluster.num_processes < 2 and cluster.process_id == 0:
        _listener(cluster).close()
    elif cluster.process_id == 0:
        _gather(cluster, time.monotonic() + timeout_s, timeout_s)
    else:
        _join(cluster, time.monotonic() + timeout_s, timeout_s)


def listen(port: int) -> socket.socket:
    """Opens a socket that listens on a port of this machine (0 for any), by both IPv6 and IPv4 if possible."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _listener(cluster: Cluster) -> socket.socket:
    port = int(cluster.address.rpartition(":")[2])
    try:
        return listen(port)
    except OSError as error:
        raise CommunicationError(
            f"Process 0 cannot listen on port {port}.",
            where=f"process 0, told by {cluster.source}",
            got=error.strerror or str(error),
            fix="SPMDCTX_ADDRESS=HOST:PORT with another port, the same for every process",
        ) from error


def _gather(cluster: Cluster, deadline: float, timeout_s: float) -> None:
    links: dict[int, socket.socket] = {}
    wanted = set(range(1, cluster.num_processes))
    with contextlib.ExitStack() as open_links:
        with _listener(cluster) as server:
            for link in _callers(server, deadline):
                open_links.enter_context(link)
                number = _hello(link, cluster, links)
                if number is not None:
                    links[number] = link
                if wanted <= set(links):
                    break
            else:
                raise _missing(cluster, sorted(wanted - set(links)), timeout_s)
        for link in links.values():
            with contextlib.suppress(OSError):
                link.sendall(_GO)
        for link in links.values():
            with contextlib.suppress(OSError):
                link.recv(1)  # they close first, so that the port is free at once


def _callers(server: socket.socket, deadline: float) -> Iterator[socket.socket]:
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        with contextlib.suppress(TimeoutError):
            link, _ = server.accept()
            link.settimeout(_HELLO_S)
            yield link


def _hello(link: socket.socket, cluster: Cluster, known: dict[int, socket.socket]) -> int | None:
    """Returns the number of a process that has connected, or None if it does not belong to the job."""
    try:
        words = link.recv(_KEPT_BYTES).split()
    except OSError:
        return None
    if len(words) != 3 or words[0] != b"spmdctx" or not (words[1].isdigit() and words[2].isdigit()):
        return None
    number, count = int(words[1]), int(words[2])
    if count != cluster.num_processes:
        raise CommunicationError(
            "The processes were told different numbers of processes.",
            got=f"process 0 {cluster.num_processes}, process {number} {count}",
            need="one number for all",
        )
    if number in known:
        raise CommunicationError(f"Two processes say that they are process {number}.", need="a number of its own for each")
    return number


def _join(cluster: Cluster, deadline: float, timeout_s: float) -> None:
    host, _, port = cluster.address.rpartition(":")
    where = f"process {cluster.process_id}, told by {cluster.source}"
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), left) as link:
                link.sendall(b"spmdctx %d %d\n" % (cluster.process_id, cluster.num_processes))
                if link.recv(_KEPT_BYTES) == _GO:
                    return
                raise CommunicationError("Process 0 has not let the job begin.", where=where, fix="see the output of process 0")
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(_RETRY_S)
    raise CommunicationError(
        f"The job of {cluster.num_processes} processes did not come together.",
        where=where,
        got=f"process 0 was not reached: {reason}",
        need=f"all processes within {timeout_s:g} s, at {cluster.address}",
    )


def _missing(cluster: Cluster, numbers: list[int], timeout_s: float) -> CommunicationError:
    return CommunicationError(
        f"The job of {cluster.num_processes} processes did not come together.",
        where=f"process 0, told by {cluster.source}",
        got=f"without process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}",
        need=f"all processes within {timeout_s:g} s, at {cluster.address}",
    )
