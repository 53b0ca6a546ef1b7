"""The watch: every process keeps a connection to process 0, so that all hear at once when one is killed or fails.

The operating system closes the connections of a process that dies, whatever the cause. It also gives up connections to a
machine that does not answer. So no timeout is needed, and a process that is only slow is never taken for dead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from types import TracebackType

import jax

from spmdctx._compat import after_leaving_job, key_value_store
from spmdctx.communication.clusters import Cluster
from spmdctx.communication.exit_notice import ExitHook
from spmdctx.communication.meeting.hub import ALONE, BYE
from spmdctx.communication.meeting.key import job_key
from spmdctx.communication.meeting.place import open_listeners
from spmdctx.communication.rendezvous import Link, gather, join
from spmdctx.communication.stopping import AGREEMENT
from spmdctx.errors import PEER_LOST, CommunicationError, message

_ADDRESS, _HERE = "spmdctx/watch", "spmdctx/watch/here"
_CONNECT_S = 10.0
_VERDICT_S = 1.0
"""Seconds that a failing process waits to hear that another one failed first."""
_TELLING_S = 0.5
_PARTING_S = 30.0
"""Seconds that process 0 waits for the others to leave JAX's job after it; all leave at the same moment, but they may be slow."""
_KEPT = 300
"""Characters of a process's error that the others are told."""


class Watch:
    """This process's part of the watch; process 0 keeps the hub of the meeting too."""

    def __init__(self, process: int, link: Link) -> None:
        self._process = process
        self._link = link
        self._left = False
        self._alone = threading.Event()
        self._ending = threading.Lock()
        self._previous = sys.excepthook
        sys.excepthook = self._failed
        self._exits = ExitHook(self._exited)
        AGREEMENT.connect(link.send)
        after_leaving_job(self._part)
        threading.Thread(target=self._listen, name="spmdctx-watch", daemon=True).start()

    def leave(self) -> None:
        """Says that this process is done; the others may go on without it."""
        if not self._left:
            self._left = True
            AGREEMENT.disconnect()
            if sys.excepthook == self._failed:
                sys.excepthook = self._previous
            self._exits.remove()
            self._link.send(BYE)

    def _part(self) -> None:
        """Ends the watch after JAX's job: from now on an end is no loss. Process 0, which has the hub, waits for the others."""
        self.leave()
        if self._process == 0:
            self._alone.wait(_PARTING_S)
        self._link.end()

    def _listen(self) -> None:
        for row in self._link.rows():
            word, _, rest = row.partition(" ")
            process, _, why = rest.partition(" ")
            if word == ALONE:
                self._alone.set()
            elif word == "gone":
                self._end(int(process), why)
            else:
                AGREEMENT.hear(word, rest)
        if not self._left:
            self._end(0, "")

    def _end(self, process: int, why: str) -> None:
        """Ends this process, with no clean-up that would wait for the one that is gone."""
        if not self._ending.acquire(blocking=False):  # its own error is being told
            return
        text = message(
            f"Process {process} {'has failed' if why else 'is gone'}; process {self._process} cannot go on without it and ends.",
            got=why or "its connection closed without a word, as when it is killed or its machine is lost",
            fix="see its output" if why else "see its output; the same command run again goes on from the last complete checkpoint",
        )
        _end_with(f"error: {text}\n", PEER_LOST)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Handles an exception that nobody caught.

        It waits first, so that the process can name a lost process instead if that caused the exception.
        """
        if not isinstance(error, KeyboardInterrupt):
            time.sleep(_VERDICT_S)
        if not self._ending.acquire(blocking=False):
            return
        with contextlib.suppress(Exception):
            self._previous(kind, error, trace)
        said = str(error).strip().splitlines()
        self._tell_and_end(f"{kind.__name__}: {said[0] if said else ''}", 130 if isinstance(error, KeyboardInterrupt) else 1)

    def _exited(self, code: int) -> None:
        if self._ending.acquire(blocking=False):
            self._tell_and_end(f"it ended with exit code {code}", code)

    def _tell_and_end(self, why: str, code: int) -> None:
        self._link.send(f"failed {why[:_KEPT]}")
        if self._process == 0:  # the hub needs the time to tell it
            time.sleep(_TELLING_S)
        _end_with("", code)


def part_unwatched(process: int, link: Link) -> None:
    """Says that no process need watch this one; it still leaves JAX's job before process 0 ends it."""

    def part() -> None:
        deadline = time.monotonic() + _PARTING_S
        while process == 0 and link.row(deadline) not in ("", ALONE):
            pass
        link.end()

    link.send(BYE)
    after_leaving_job(part)


def connect_beside_jax(cluster: Cluster, timeout_s: float) -> Link | None:
    """Meets in a job that the user has connected by JAX; returns None, with a warning, if the processes cannot reach each other.

    Process 0 listens on a port of the system's choice, which it tells by JAX's store.
    """
    store, process = key_value_store(), jax.process_index()
    key = job_key(os.environ, cluster)
    host = cluster.address.rpartition(":")[0]
    if process == 0:
        for other in range(1, jax.process_count()):
            store.get(f"{_HERE}/{other}", timeout_s)
        servers = open_listeners(os.environ, cluster, port=0)
        port = str(servers[0].getsockname()[1])
        store.set(_ADDRESS, port)
    else:
        store.set(f"{_HERE}/{process}", "yes")
        port = store.get(_ADDRESS, timeout_s) or "0"
    place = cluster._replace(address=f"{host}:{port}", process_id=process, num_processes=jax.process_count())
    try:
        return join(place, key, _CONNECT_S).link if process else gather(place, key, servers, _CONNECT_S)
    except (CommunicationError, ValueError, OverflowError):
        warnings.warn(
            f"Process {process} cannot meet the others at port {port} of {host}: "
            "that another process is lost is noticed by JAX's heartbeats only.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _end_with(text: str, code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # Past Python's own stream: a thread that is stuck may hold its lock.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(code)
