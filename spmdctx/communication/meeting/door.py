"""The door of the meeting: process 0 hears all callers at once, within bounds, and lets in those that have the job's key."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Sequence

from spmdctx.communication.meeting.hub import Hub
from spmdctx.communication.meeting.link import close_in_children, keep_alive
from spmdctx.communication.meeting.proof import LINE_BYTES, answer, greeting, new_nonce, read_hello

HELLO_S = 5.0
"""Seconds from the connection to the proof."""
CALLERS = 64
"""Callers that may be at the door at once, besides one for each process of the job; half of them from one address."""

_PAUSE_S = 0.05


class Door:
    """Process 0's listening sockets, until all processes have come.

    Whoever connects while the callers are too many takes the place of the caller that waits longest, of the same address if that
    has too many. A process needs milliseconds to prove itself, and calls again if it was not fast enough.
    """

    def __init__(self, servers: Sequence[socket.socket], key: bytes, num_processes: int, hub: Hub) -> None:
        self.turned_away = 0
        self._servers, self._key, self._hub = servers, key, hub
        self._most = CALLERS + num_processes
        self._most_of_one = CALLERS // 2 + num_processes
        self._waiting: dict[asyncio.Task[None], str] = {}

    async def open_for(self, seconds: float) -> None:
        """Lets processes in until all have come, and closes the listening sockets.

        Raises:
            TimeoutError: not all have come in time.
        """
        accepting = [asyncio.create_task(self._accept(server)) for server in self._servers]
        try:
            async with asyncio.timeout(seconds):
                await self._hub.complete.wait()
        finally:
            tasks = [*accepting, *self._waiting]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for server in self._servers:
                server.close()

    async def _accept(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        server.setblocking(False)
        while True:
            try:
                link, address = await loop.sock_accept(server)
            except OSError:  # no file is left for it, or it has gone again
                await asyncio.sleep(0 if self._make_room("", 1) else _PAUSE_S)
                continue
            host = str(address[0])
            self._make_room(host, self._most_of_one)
            self._make_room("", self._most)
            task = asyncio.create_task(self._hear(link))
            self._waiting[task] = host
            task.add_done_callback(lambda task: self._waiting.pop(task, None))
            await asyncio.sleep(0)  # others have their turn, however many call

    def _make_room(self, host: str, most: int) -> bool:
        """Sends away the caller that waits longest if there are as many as may be, of one host or of the one with most.

        Returns whether it did.
        """
        counts = Counter(self._waiting.values())
        if (counts[host] if host else counts.total()) < most or not counts:
            return False
        crowd = host or max(counts, key=lambda one: counts[one])
        oldest = next(task for task, one in self._waiting.items() if one == crowd)
        del self._waiting[oldest]
        oldest.cancel()
        return True

    async def _hear(self, link: socket.socket) -> None:
        """Lets one caller in, or closes its connection."""
        inside = False
        try:
            # What a stranger sends may be too long (ValueError); any other fault in it ends this one connection too.
            with contextlib.suppress(OSError, ValueError):
                async with asyncio.timeout(HELLO_S):
                    inside = await self._let_in(link)
        finally:
            if not inside:
                self.turned_away += 1
                link.close()

    async def _let_in(self, link: socket.socket) -> bool:
        keep_alive(link)
        close_in_children(link)
        reader, writer = await asyncio.open_connection(sock=link, limit=LINE_BYTES)
        inside = False
        try:
            greeted = new_nonce()
            writer.write(greeting(greeted))
            caller = read_hello(self._key, greeted, await reader.readline())
            if caller is not None:
                refusal = self._hub.verdict(caller)
                inside = not refusal
                writer.write(answer(self._key, greeted, caller, refusal))
                if inside:
                    self._hub.add(caller, (reader, writer), self._key, greeted)
                else:
                    await reader.read(1)  # it closes first, so that it has read the words
        finally:
            if not inside:
                writer.transport.abort()
        return inside
