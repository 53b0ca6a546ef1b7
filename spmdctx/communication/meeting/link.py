"""A process's own connection to process 0: lines with bounds, then rows that are sealed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator

from spmdctx.communication.meeting.proof import LINE_BYTES, Seal

_SILENCE_S = 10
"""Seconds after which the system gives up a connection to a machine that does not answer."""


class Link:
    """The connection; it takes over the socket, and closes it in forked children, which would hide that this process is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self._seals: tuple[Seal, Seal] | None = None
        self._sending = threading.Lock()
        keep_alive(connection)
        close_in_children(connection)

    def __del__(self) -> None:
        self.close()

    def line(self, deadline: float) -> bytes:
        """Returns the next line with its end.

        Raises:
            OSError: the connection is closed, the line is too long, or it does not come before the deadline of `time.monotonic`.
        """
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._connection.settimeout(left)
            self._receive()
        return self._next()

    def write(self, line: bytes) -> None:
        """Sends a line as it is, within the time that the line read last was given."""
        self._connection.sendall(line)

    def seal(self, key: bytes, own: str, other: str) -> None:
        """Seals all that follows, by the connection's key and what the two sides are called."""
        self._seals = Seal(key, own), Seal(key, other)
        self._connection.settimeout(None)

    def send(self, text: str) -> None:
        """Sends a row, if the other side still listens."""
        assert self._seals is not None, "rows are sent after the meeting"
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(self._seals[0].sealed(text))

    def rows(self) -> Iterator[str]:
        """Yields what the other side says until the connection ends; what it has not said is left out."""
        assert self._seals is not None, "rows are read after the meeting"
        while True:
            while b"\n" in self._buffer:
                if text := self._seals[1].opened(self._next()):
                    yield text
            try:
                self._receive()
            except OSError:
                return

    def row(self, deadline: float) -> str:
        """Returns the next row, empty if the other side does not say it before the deadline."""
        assert self._seals is not None, "rows are read after the meeting"
        try:
            line = self.line(deadline)
            self._connection.settimeout(None)
        except OSError:
            return ""
        return self._seals[1].opened(line)

    def close(self) -> None:
        """Closes the connection, in this process alone if it was forked."""
        self._connection.close()

    def end(self) -> None:
        """Ends the connection for both sides, though another thread may be reading it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _receive(self) -> None:
        if len(self._buffer) > LINE_BYTES:
            raise ConnectionError("a line that is too long")
        data = self._connection.recv(LINE_BYTES)
        if not data:
            raise ConnectionError("the connection was closed")
        self._buffer += data

    def _next(self) -> bytes:
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"


def close_in_children(connection: socket.socket) -> None:
    """Closes a socket in children that this process forks, as long as the socket is there."""
    reference = weakref.ref(connection)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    os.register_at_fork(after_in_child=close)


def keep_alive(connection: socket.socket) -> None:
    """Has the system give up the connection when the other machine does not answer, and send short lines at once."""
    if connection.family == getattr(socket, "AF_UNIX", None):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", _SILENCE_S // 2 - 1),
        ("TCP_USER_TIMEOUT", 1000 * _SILENCE_S),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
