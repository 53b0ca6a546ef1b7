"""The meeting of a job's processes before JAX connects them, which names missing processes; JAX would abort without a word.

Process 0 listens at the job's address. The others prove that they have the job's key and wait for its word. Then nothing of this
listens any more, JAX takes over the port, and the connections that are left serve the watch.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from spmdctx.communication.clusters import Cluster
from spmdctx.communication.meeting.door import Door
from spmdctx.communication.meeting.hub import GO, Hub
from spmdctx.communication.meeting.key import TOKEN, Key, job_key
from spmdctx.communication.meeting.link import Link, close_in_children
from spmdctx.communication.meeting.place import forget_service_address, is_in_reach, listen, new_service_address, open_listeners
from spmdctx.communication.meeting.proof import Caller, hello, new_nonce, read_answer, read_greeting, session_key
from spmdctx.errors import CommunicationError

__all__ = ["Link", "Met", "gather", "join", "listen", "meet"]

_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0
_STEP_S = 10.0
"""Seconds that process 0 may take for each line of the meeting, before the caller calls again."""


class Met(NamedTuple):
    """What the meeting leaves: this process's connection to process 0, None for a process alone, and JAX's address.

    `service` is where JAX's own service listens, as gRPC writes addresses.
    """

    link: Link | None
    service: str


def meet(cluster: Cluster, timeout_s: float) -> Met:
    """Waits until all processes have connected.

    Raises:
        CommunicationError: some do not connect in time, two have the same number, they were told different numbers of processes, or
            the port of process 0 is in use.
        ContextError: the job's token is too short.
    """
    key = job_key(os.environ, cluster)
    if cluster.process_id:
        return join(cluster, key, timeout_s)
    servers = open_listeners(os.environ, cluster)
    if cluster.num_processes < 2:
        for server in servers:
            server.close()
        return Met(None, new_service_address(os.environ, cluster))
    if not key.is_secret:
        warnings.warn(
            f"No secret keeps strangers out of this job: any process that reaches {cluster.address} can join it. "
            f"Set {TOKEN} to one secret on all processes (SECURITY.md).",
            RuntimeWarning,
            stacklevel=4,
        )
    service = new_service_address(os.environ, cluster)
    try:
        return Met(gather(cluster, key, servers, timeout_s, service), service)
    except BaseException:
        forget_service_address(service)
        raise


def gather(cluster: Cluster, key: Key, servers: Sequence[socket.socket], timeout_s: float, service: str = "") -> Link:
    """Waits, as process 0, until all others have come, and tells them where JAX's service is; the sockets are closed then.

    Raises:
        CommunicationError: some have not come in time, or process 0 can open no more files.
    """
    try:
        return _Meeting(cluster, key, servers, timeout_s, service).link()
    except OSError as error:  # no file is left for an event loop
        for server in servers:
            server.close()
        raise CommunicationError(
            "Process 0 cannot open what it needs to meet the others.", where=_place(cluster), got=error.strerror or str(error)
        ) from error


class _Meeting:
    """Process 0's side: the door, and then the hub, on a thread with an event loop of its own."""

    def __init__(self, cluster: Cluster, key: Key, servers: Sequence[socket.socket], timeout_s: float, service: str) -> None:
        self._cluster, self._key, self._servers, self._timeout_s, self._service = cluster, key, servers, timeout_s, service
        self._all_here: Future[None] = Future()
        self._own_key = secrets.token_bytes(32)
        self._own, self._hubs = socket.socketpair()
        for one in (*servers, self._hubs):
            close_in_children(one)

    def link(self) -> Link:
        """Runs the meeting, and returns process 0's own connection to the hub."""
        thread = threading.Thread(target=self._serve, name="spmdctx-hub", daemon=True)
        thread.start()
        try:
            self._all_here.result()
        except BaseException:
            self._own.close()  # an interrupt, which the meeting must not outlive
            raise
        link = Link(self._own)
        link.seal(self._own_key, "process 0", "hub")
        return link

    def _serve(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._run())
        except Exception as error:
            self._hubs.close()
            if not self._all_here.done():
                self._all_here.set_exception(error)

    async def _run(self) -> None:
        hub = Hub(self._cluster.num_processes)
        door = Door(self._servers, self._key.secret, self._cluster.num_processes, hub)
        await hub.add_own(self._hubs, self._own_key)
        try:
            await door.open_for(self._timeout_s)
            if not hub.abandoned:
                hub.begin(self._service)
                self._all_here.set_result(None)
                await hub.ended()
        except TimeoutError:
            self._all_here.set_exception(_missing(self._cluster, hub, door.turned_away, self._timeout_s))
        finally:
            await hub.end()


def join(cluster: Cluster, key: Key, timeout_s: float) -> Met:
    """Connects this process to process 0, and waits for the word to begin.

    Raises:
        CommunicationError: process 0 is not reached in time, refuses this process, or ends.
    """
    deadline = time.monotonic() + timeout_s
    host, _, port = cluster.address.rpartition(":")
    reason, pause = "no answer", _RETRY_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = Link(socket.create_connection((host.strip("[]"), int(port)), left))
            try:
                return _joined(link, cluster, key, deadline)
            except BaseException:
                link.close()
                raise
        except _NotProcess0 as error:
            reason, pause = str(error), min(2 * pause, _LONGEST_RETRY_S)
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
    raise CommunicationError(
        f"The job of {cluster.num_processes} processes did not come together.",
        where=_place(cluster),
        got=f"process 0 was not reached: {reason}",
        need=f"all processes within {timeout_s:g} s, at {cluster.address}",
    )


class _NotProcess0(Exception):
    """What answers at the address is not process 0 of this job, or takes this process for a stranger."""


def _joined(link: Link, cluster: Cluster, key: Key, deadline: float) -> Met:
    caller = Caller(cluster.process_id, cluster.num_processes, new_nonce())
    try:
        greeted = read_greeting(link.line(min(deadline, time.monotonic() + _STEP_S)))
    except OSError as error:
        raise _NotProcess0(f"what answers says nothing that process 0 of a job would say ({error})") from error
    if greeted is None:
        raise _NotProcess0("what answers is not process 0 of a job")
    try:
        link.write(hello(key.secret, greeted, caller))
        refusal = read_answer(key.secret, greeted, caller, link.line(min(deadline, time.monotonic() + _STEP_S)))
    except OSError as error:
        raise _NotProcess0(f"it does not let this process in, as if it had another key than {key.source}") from error
    if refusal is None:
        raise _NotProcess0(f"what answers does not have the job's key, {key.source}")
    if refusal:
        raise CommunicationError(
            f"Process 0 does not let this process join: {refusal}", where=_place(cluster), need="a number of its own for each"
        )
    link.seal(session_key(key.secret, greeted, caller), "caller", "process 0")
    word, _, service = link.row(deadline + _STEP_S).partition(" ")
    if word != GO:
        raise CommunicationError("Process 0 has not let the job begin.", where=_place(cluster), fix="see the output of process 0")
    if not is_in_reach(service):
        raise CommunicationError(
            "This process does not see the files of process 0's machine, though its address is that of one machine alone.",
            where=_place(cluster),
            got=service,
            fix="SPMDCTX_ADDRESS=HOST:PORT with a host that is not a loopback address",
        )
    return Met(link, service)


def _place(cluster: Cluster) -> str:
    return f"process {cluster.process_id}, told by {cluster.source}"


def _missing(cluster: Cluster, hub: Hub, turned_away: int, timeout_s: float) -> CommunicationError:
    numbers = hub.missing
    absent = f"without process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}"
    strangers = f"; connections turned away: {turned_away}" if turned_away else ""
    refusals = "".join(f" {words}" for words in hub.refusals)
    return CommunicationError(
        f"The job of {cluster.num_processes} processes did not come together.{refusals}",
        where=_place(cluster),
        got=absent + strangers,
        need=f"all processes within {timeout_s:g} s, at {cluster.address}" + ("" if not turned_away else ", with one token"),
    )
