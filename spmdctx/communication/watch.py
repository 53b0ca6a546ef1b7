"""The watch: every process keeps a connection to process 0, so that all hear at once when one is killed or fails.

The operating system closes the connections of a process that dies, whatever the cause. It also gives up connections to a
machine that does not answer. So no timeout is needed, and a process that is only slow is never taken for dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import warnings
from types import TracebackType
from typing import Any

import jax

from spmdctx._compat import key_value_store
from spmdctx.communication.clusters import Cluster
from spmdctx.communication.exit_notice import ExitHook
from spmdctx.communication.rendezvous import listen
from spmdctx.errors import message

PEER_LOST = 76
"""Exit code of a process that ends because another process did: the protocol error of BSD's sysexits."""

_ADDRESS = "spmdctx/watch"
_CONNECT_S = 10.0
_VERDICT_S = 1.0
"""Seconds that a failing process waits to hear that another one failed first."""
_TELLING_S = 0.5
_SILENCE_S = 10
"""Seconds after which the system gives up a connection to a machine that does not answer."""
_KEPT = 300
"""Characters of a process's error that the others are told."""


class Watch:
    """This process's part of the watch; process 0 keeps the hub too."""

    def __init__(self, process: int, link: socket.socket) -> None:
        self._process = process
        self._link = link
        self._left = False
        self._ending = threading.Lock()
        self._previous = sys.excepthook
        sys.excepthook = self._failed
        self._exits = ExitHook(self._exited)
        os.register_at_fork(after_in_child=link.close)
        threading.Thread(target=self._listen, name="spmdctx-watch", daemon=True).start()

    def leave(self) -> None:
        """Says that this process is done; the others may go on without it."""
        if not self._left:
            self._left = True
            if sys.excepthook == self._failed:
                sys.excepthook = self._previous
            self._exits.remove()
            _send(self._link, {"bye": self._process})

    def _listen(self) -> None:
        for row in _rows(self._link):
            if "gone" in row:
                self._end(int(row["gone"]), str(row["why"]))
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
        _send(self._link, {"failed": self._process, "why": why[:_KEPT]})
        if self._process == 0:  # the hub needs the time to tell it
            time.sleep(_TELLING_S)
        _end_with("", code)


def start_watch(cluster: Cluster, timeout_s: float) -> Watch | None:
    """Connects this process to the watch; returns None, with a warning, if it cannot be reached."""
    store, process = key_value_store(), jax.process_index()
    host = cluster.address.rpartition(":")[0].strip("[]")
    if process == 0:
        token = secrets.token_hex(8)
        hub = _Hub(listen(0), token, jax.process_count())
        store.set(_ADDRESS, f"{hub.port} {token}")
    said = store.get(_ADDRESS, timeout_s)
    port, _, token = (said or "0 ").partition(" ")
    try:
        link = socket.create_connection(("localhost" if process == 0 else host, int(port)), _CONNECT_S)
        _keep_alive(link)
        _send(link, {"hello": process, "token": token})
        answer = link.recv(1)
    except OSError:
        answer = b""
    if not answer:
        warnings.warn(
            f"Process {process} cannot reach port {port} of {host}: that another process is lost is noticed by JAX's heartbeats only.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    link.settimeout(None)
    return Watch(process, link)


class _Hub:
    """Hears from all processes, and tells all of the first one that is lost."""

    def __init__(self, server: socket.socket, token: str, count: int) -> None:
        self.port = int(server.getsockname()[1])
        self._server, self._token, self._count = server, token, count
        self._members: dict[socket.socket, int] = {}
        self._left: set[int] = set()
        self._buffers: dict[socket.socket, bytes] = {}
        self._poll = selectors.DefaultSelector()
        self._poll.register(server, selectors.EVENT_READ)
        os.register_at_fork(after_in_child=self._close)
        threading.Thread(target=self._serve, name="spmdctx-hub", daemon=True).start()

    def _serve(self) -> None:
        while len(self._left) < self._count:
            for key, _ in self._poll.select():
                link: Any = key.fileobj
                if link is self._server:
                    self._accept()
                else:
                    self._hear(link)

    def _accept(self) -> None:
        link, _ = self._server.accept()
        _keep_alive(link)
        self._buffers[link] = b""
        self._poll.register(link, selectors.EVENT_READ)

    def _hear(self, link: socket.socket) -> None:
        try:
            data = link.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._poll.unregister(link)
            process = self._members.pop(link, None)
            if process is not None and process not in self._left:
                self._tell(process, "")
            return
        *lines, self._buffers[link] = (self._buffers[link] + data).split(b"\n")
        for line in lines:
            self._take(link, _row(line))

    def _take(self, link: socket.socket, row: dict[str, Any]) -> None:
        if row.get("token") == self._token:
            self._members[link] = int(row["hello"])
            link.sendall(b"\n")
        elif link in self._members and "bye" in row:
            self._left.add(self._members[link])
        elif link in self._members and "failed" in row:
            self._left.add(self._members[link])
            self._tell(self._members[link], str(row["why"]))

    def _tell(self, process: int, why: str) -> None:
        # This process's own member comes last: it ends the process, and the hub with it.
        for link, other in sorted(self._members.items(), key=lambda pair: -pair[1]):
            if other != process:
                _send(link, {"gone": process, "why": why})

    def _close(self) -> None:
        """Closes the connections in a forked child, which would otherwise hide that this process is gone."""
        self._server.close()
        for link in self._buffers:
            link.close()


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", _SILENCE_S // 2 - 1),
        ("TCP_USER_TIMEOUT", 1000 * _SILENCE_S),
    ):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(link: socket.socket, row: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(row).encode() + b"\n")


def _rows(link: socket.socket) -> Any:
    buffer = b""
    while True:
        try:
            data = link.recv(4096)
        except OSError:
            return
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        yield from (_row(line) for line in lines)


def _row(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line or b"{}")
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _end_with(text: str, code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # Past Python's own stream: a thread that is stuck may hold its lock.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(code)
