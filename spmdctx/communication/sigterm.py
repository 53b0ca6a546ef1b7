"""Catches SIGTERM while training could save, also while Python's own thread waits for a computation."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

import jax

from spmdctx.communication.current import current_world, is_initialized
from spmdctx.communication.stopping import AGREEMENT
from spmdctx.errors import SAVED, ContextError, message

GRACE = "SPMDCTX_GRACE_S"
"""Seconds from SIGTERM to the end of a process that has not begun to save; manifests of `spmdctx k8s` set it."""

_DEFAULT_GRACE_S = 30.0
_KILLED = 128 + signal.SIGTERM


class SigtermCatcher:
    """Turns the first SIGTERM into a request to stop, while somebody wants this; the second one ends the process.

    Python runs its handlers on the main thread, between two steps of it. So the system's own handler wakes a thread besides.
    """

    def __init__(self) -> None:
        self._users, self._heard, self._owner = 0, 0, 0
        self._grace_s = _DEFAULT_GRACE_S
        self._wakeup: socket.socket | None = None
        self._timer: threading.Timer | None = None
        self._is_registered = False
        self._former: Any = signal.SIG_DFL

    def begin(self) -> bool:
        """Catches SIGTERM from now on; returns whether it does: not beside a handler of the user's, nor on another thread.

        Raises:
            ContextError: `SPMDCTX_GRACE_S` is no number of seconds.
        """
        self._grace_s = _grace(os.environ.get(GRACE))
        if self._users:
            self._users += 1
            return True
        former = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or former not in (signal.SIG_DFL, _exit):
            return False
        self._former = former
        self._users, self._heard, self._owner = 1, 0, os.getpid()
        signal.signal(signal.SIGTERM, self._handle)
        self._listen()
        if not self._is_registered:
            self._is_registered = True
            os.register_at_fork(after_in_child=self._forget)
        return True

    def end(self) -> None:
        """Undoes one `begin` that has returned True."""
        self._users -= 1
        if self._users:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if threading.current_thread() is threading.main_thread():
            self._release()

    def saving(self) -> None:
        """Says that the process saves: it now takes as long as it takes."""
        if self._timer is not None:
            self._timer.cancel()

    def _listen(self) -> None:
        """Has the system wake a thread for each signal, unless an event loop of the user's is woken already."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        former = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if former != -1:
            signal.set_wakeup_fd(former)
            reader.close()
            writer.close()
            return
        self._wakeup = writer
        threading.Thread(target=self._read, args=(reader,), name="spmdctx-sigterm", daemon=True).start()

    def _read(self, reader: socket.socket) -> None:
        with reader, contextlib.suppress(OSError):
            while data := reader.recv(64):
                for _ in range(data.count(signal.SIGTERM)):
                    self._take()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self._users or os.getpid() != self._owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._wakeup is None:
            # Not here: this thread may hold a lock that the request needs.
            threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        self._heard += 1
        if self._heard > 1:
            _end_with("")
        self._timer = threading.Timer(self._grace_s, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        AGREEMENT.request()

    def _give_up(self) -> None:
        if self._users:
            text = message(
                f"SIGTERM came {self._grace_s:g} s ago, and no step has ended since; the process ends without saving.",
                fix=f"{GRACE}=SECONDS for steps that take longer; the same command run again goes on from the last complete checkpoint",
            )
            _end_with(f"error: {text}\n")

    def _release(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._former)
        if self._wakeup is not None:
            found = signal.set_wakeup_fd(-1)
            if found != self._wakeup.fileno() and found != -1:
                signal.set_wakeup_fd(found)
            self._wakeup.close()
            self._wakeup = None

    def _forget(self) -> None:
        """Gives up in a forked child: it would wake its parent."""
        if self._users and os.getpid() != self._owner:
            self._users, self._timer = 0, None
            with contextlib.suppress(ValueError):  # the fork was made by another thread than the main one
                self._release()


CATCHER = SigtermCatcher()
"""That of this process."""


def end_when_told() -> None:
    """Has SIGTERM end the first process of a container too, where the system does nothing unless a process says so."""
    if os.getpid() == 1 and threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    del number, frame
    sys.exit(_KILLED)


class GracefulEnd:
    """The wish of a training to save and end after SIGTERM, until it is closed."""

    def __init__(self) -> None:
        # Of processes that cannot ask each other, one would save alone.
        self._is_caught = (jax.process_count() == 1 or AGREEMENT.is_connected) and CATCHER.begin()

    def is_here(self) -> bool:
        """Returns whether all processes end here; all come here equally often."""
        found = AGREEMENT.passes()
        if found:
            CATCHER.saving()
        return found

    def leave(self, what: str) -> NoReturn:
        """Ends the process, with the others of its job.

        Raises:
            SystemExit: with the code 75.
        """
        if jax.process_index() == 0:
            sys.stderr.write(f"SIGTERM: {what} is saved; the same command run again goes on from there.\n")
        watch = current_world("leave").watch if is_initialized() else None
        if watch is not None:
            watch.leave()
        raise SystemExit(SAVED)

    def close(self) -> None:
        """Lets SIGTERM end the process again."""
        if self._is_caught:
            self._is_caught = False
            CATCHER.end()


def _grace(text: str | None) -> float:
    try:
        seconds = _DEFAULT_GRACE_S if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ContextError(f"{GRACE} must be a number of seconds.", got=ascii(text)[:80], need="a number above 0")
    return seconds


def _end_with(text: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(_KILLED)
