"""The hub: process 0's ends of the connections of all processes; it hears which are lost, and tells the others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import NamedTuple

from spmdctx.communication.meeting.proof import Caller, Seal, session_key

BYE, GO, ALONE = "bye", "go", "alone"
"""A process is done; the job begins; process 0 is the only one left."""

STOP, AT, UNTIL = "stop", "at", "until"
"""A process asks for a stop, and all are asked; each tells how far it is; all are told where to stop."""

_MOST_REFUSALS = 8


class Member(NamedTuple):
    """A process that has joined, and the seals of both directions of its connection."""

    process: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sent: Seal
    heard: Seal


class Hub:
    """The members of a job; used by one event loop only.

    Attributes:
        complete: set when all have joined, or when process 0 itself has given up the meeting (`abandoned`).
        refusals: why processes that have the key were not let in.
    """

    def __init__(self, num_processes: int) -> None:
        self.complete = asyncio.Event()
        self.abandoned = False
        self.refusals: list[str] = []
        self._count = num_processes
        self._members: dict[int, Member] = {}
        self._left: set[int] = set()
        self._closed: set[int] = set()
        self._begun = False
        self._hearing: set[asyncio.Task[None]] = set()
        self._passed: dict[int, int] | None = None

    @property
    def missing(self) -> list[int]:
        """The processes that have not joined."""
        return [number for number in range(1, self._count) if number not in self._members]

    def verdict(self, caller: Caller) -> str:
        """Returns why a process that has the key may not join, empty if it may."""
        if caller.num_processes != self._count:
            told = f"process 0 {self._count}, process {caller.process} {caller.num_processes}"
            words = f"The processes were told different numbers of processes: {told}."
        elif not 0 < caller.process < self._count:
            words = f"There is no process {caller.process} to join process 0 of {self._count}."
        elif caller.process in self._members:
            words = f"Two processes say that they are process {caller.process}."
        else:
            return ""
        if words not in self.refusals and len(self.refusals) < _MOST_REFUSALS:
            self.refusals.append(words)
        return words

    async def add_own(self, link: socket.socket, key: bytes) -> None:
        """Adds process 0 itself, by one end of a pair of sockets."""
        reader, writer = await asyncio.open_connection(sock=link)
        self._add(Member(0, reader, writer, Seal(key, "hub"), Seal(key, "process 0")))

    def add(self, caller: Caller, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], key: bytes, greeted: bytes) -> None:
        """Adds a process that was welcomed."""
        session = session_key(key, greeted, caller)
        self._add(Member(caller.process, *streams, Seal(session, "process 0"), Seal(session, "caller")))

    def begin(self, service: str) -> None:
        """Tells all that the job begins, and where JAX's service is; who is lost from now on is missed."""
        self._begun = True
        for member in self._members.values():
            if member.process:
                member.writer.write(member.sent.sealed(f"{GO} {service}"))

    async def ended(self) -> None:
        """Waits until all connections have ended."""
        while self._hearing:
            await asyncio.wait(self._hearing)

    async def end(self) -> None:
        """Ends all connections. Streams refer to what waits for them weakly, so nobody else would hold it until then."""
        hearing = list(self._hearing)
        for task in hearing:
            task.cancel()
        await asyncio.gather(*hearing, return_exceptions=True)

    def _add(self, member: Member) -> None:
        self._members[member.process] = member
        task = asyncio.get_running_loop().create_task(self._hear(member))
        self._hearing.add(task)
        task.add_done_callback(self._hearing.discard)
        if not self.missing:
            self.complete.set()

    async def _hear(self, member: Member) -> None:
        try:
            # A line that is too long is a ValueError of the stream's.
            with contextlib.suppress(OSError, ValueError):
                while line := await member.reader.readline():
                    self._take(member, member.heard.opened(line))
        finally:
            member.writer.transport.abort()
        self._lost(member.process)

    def _take(self, member: Member, text: str) -> None:
        word, _, why = text.partition(" ")
        if word == BYE:
            self._left.add(member.process)
            self._settle()
        elif word == "failed":
            self._left.add(member.process)
            self._tell(member.process, why)
        elif word == STOP and self._passed is None:
            self._passed = {}
            self._tell_all(STOP)
        elif word == AT and self._passed is not None:
            self._passed[member.process] = int(why)
            self._settle()

    def _settle(self) -> None:
        """Tells where to stop, once all have told how far they are: at the first place that nobody has passed."""
        if self._passed and not self._members.keys() - self._left - self._passed.keys():
            place, self._passed = max(self._passed.values()) + 1, None
            self._tell_all(f"{UNTIL} {place}")

    def _tell_all(self, text: str) -> None:
        for process, member in self._members.items():
            if process not in self._left:
                member.writer.write(member.sent.sealed(text))

    def _lost(self, process: int) -> None:
        """Frees the place of a process that is lost before the job begins; later its loss is told."""
        if not self._begun:
            del self._members[process]
            self.abandoned = process == 0
            (self.complete.set if self.abandoned else self.complete.clear)()
            return
        if process not in self._left:
            self._left.add(process)
            self._tell(process, "")
        self._closed.add(process)
        if self._members.keys() - self._closed == {0}:
            own = self._members[0]
            own.writer.write(own.sent.sealed(ALONE))

    def _tell(self, process: int, why: str) -> None:
        # Process 0 itself comes last: it ends, and the hub with it.
        for other, member in sorted(self._members.items(), reverse=True):
            if other != process:
                member.writer.write(member.sent.sealed(f"gone {process} {why}"))
