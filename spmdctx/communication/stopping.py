"""A request to stop: when one process of a job has got SIGTERM, all stop after the same step, so that they can save together.

Each process counts the places at which it could stop. The hub of the watch asks all for their counts, and none passes such a place
until the hub has told the next one that nobody has passed yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from spmdctx.communication.meeting.hub import AT, STOP, UNTIL


class Agreement:
    """This process's part in choosing the place; a process alone chooses its next one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passed = 0
        self._until: int | None = None
        self._is_asked = False
        self._send: Callable[[str], None] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the others of a job can be asked."""
        return self._send is not None

    def connect(self, send: Callable[[str], None]) -> None:
        """Takes part in a job, whose hub gets rows by `send`."""
        with self._changed:
            self._send = send

    def disconnect(self) -> None:
        """Takes part no more; whoever waits for the hub goes on."""
        with self._changed:
            self._send, self._is_asked = None, False
            self._changed.notify_all()

    def request(self) -> None:
        """Asks for a stop: SIGTERM has come."""
        with self._changed:
            send = self._send
            if send is None:
                self._until = self._passed + 1
        if send is not None:
            send(STOP)

    def hear(self, word: str, rest: str) -> None:
        """Takes a row of the hub."""
        with self._changed:
            if word == STOP and self._send is not None:
                self._is_asked = True
                self._send(f"{AT} {self._passed}")
            elif word == UNTIL:
                self._until, self._is_asked = int(rest), False
                self._changed.notify_all()

    def passes(self) -> bool:
        """Comes to a place at which all processes could stop, each as often as the others; returns whether this is the one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_asked)
            self._passed += 1
            if self._until is None or self._passed < self._until:
                return False
            self._until = None
            return True


AGREEMENT = Agreement()
"""That of this process."""
