"""What strangers do to a job: each attack gets the job's ports and its key, and the sockets that it holds stay open till the end."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from spmdctx.communication.meeting import proof

LASTS_S = 2.5
_NONCE = b"0" * 32
_ROWS = (
    b"{}", b"[]", b"null", b'{"hello": 1}', b'{"hello": 1, "token": "x"}', b'{"bye": 0}', b'{"failed": 1, "why": "x"}',
    b'{"gone": 0, "why": "x"}', b'{"token": null, "hello": 1}', b'{"token": ["a"], "hello": 0}', b'{"hello": {}}', b"9" * 5000, b"\xff\xfe",
    b'"\\ud800"', b"{" * 1000,
)  # fmt: skip
_TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512)
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\xff" * 64


class Target(NamedTuple):
    """The ports on which the job listens, its key (for attacks by who knows it), and the strangers' sockets that stay open."""

    ports: Sequence[int]
    key: bytes
    held: list[socket.socket]

    def call(self, port: int) -> socket.socket:
        """Connects, and keeps the socket."""
        made = socket.create_connection(("127.0.0.1", port), 5)
        self.held.append(made)
        return made


Move = Callable[[Target], None]


def nothing(target: Target) -> None:
    """Attacks nothing."""


def sends(*texts: bytes, times: int = 1, keeps: bool = False) -> Move:
    """Sends each text on connections of their own."""

    def move(target: Target) -> None:
        for port in target.ports:
            for text in texts * times:
                with suppress(OSError):
                    made = target.call(port)
                    made.settimeout(1)
                    made.sendall(text)
                    if not keeps:
                        target.held.pop().close()

    return move


def garbage(target: Target) -> None:
    """Sends random bytes, and resets half of the connections."""
    chance = random.Random(1)
    for port in target.ports:
        for _ in range(50):
            with suppress(OSError):
                made = socket.create_connection(("127.0.0.1", port), 5)
                made.settimeout(1)
                if chance.random() < 0.5:
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with made:
                    made.sendall(chance.randbytes(chance.choice((1, 10, 1000, 100_000))))


def endless(target: Target) -> None:
    """Sends a line that does not end."""
    until = time.monotonic() + LASTS_S
    links = []
    for port in target.ports:
        with suppress(OSError):
            links.append(target.call(port))
    for link in links:
        link.settimeout(0.2)
    while time.monotonic() < until:
        for link in links:
            with suppress(OSError):
                link.send(b"x" * (1 << 20))
        time.sleep(0.01)


def holds(count: int) -> Move:
    """Opens connections and says nothing."""

    def move(target: Target) -> None:
        for port in target.ports:
            for _ in range(count):
                with suppress(OSError):
                    target.call(port)

    return move


def scans(count: int, *, reset: bool = False) -> Move:
    """Opens and closes connections."""

    def move(target: Target) -> None:
        for port in target.ports:
            for _ in range(count):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as made:
                    if reset:
                        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return move


def slow(target: Target) -> None:
    """Sends a right beginning, letter by letter, on 20 connections."""
    links = []
    for port in target.ports:
        for _ in range(20):
            with suppress(OSError):
                links.append(target.call(port))
    for letter in b"hello 1 2 000":
        for link in links:
            with suppress(OSError):
                link.send(bytes([letter]))
        time.sleep(LASTS_S / 13)


def says(*said: Callable[[bytes, bytes], bytes]) -> Move:
    """Says something of the protocol, made from process 0's nonce and the job's key, on connections of their own."""

    def move(target: Target) -> None:
        for make in said:
            link = target.call(target.ports[0])
            greeted = link.makefile("rb").readline(100).split()
            link.sendall(make(greeted[1] if len(greeted) == 2 else _NONCE, target.key))

    return move


def hello(process: int, num_processes: int) -> Callable[[bytes, bytes], bytes]:
    """The words of who knows the key."""
    return lambda greeted, key: proof.hello(key, greeted, proof.Caller(process, num_processes, _NONCE))


def _wrong_key(greeted: bytes, key: bytes) -> bytes:
    return hello(1, 2)(greeted, b"another key" + key)


def _replayed(greeted: bytes, key: bytes) -> bytes:
    del greeted
    return hello(1, 2)(_NONCE, key)


def _reflected(greeted: bytes, key: bytes) -> bytes:
    return proof.answer(key, greeted, proof.Caller(1, 2, _NONCE), "")


def _forged_rows(greeted: bytes, key: bytes) -> bytes:
    del greeted
    return b"0" * 64 + b" bye\n" + b"0" * 64 + b" failed x\n" + proof.Seal(key, "caller").sealed("failed by a stranger")


class Attack(NamedTuple):
    """An attack: when (in the "meeting" or while the job is "running"), what is done, and around it.

    `limit` is the job's limit of open files (the soft one, unless the attack is on its own port), `dies` the process that is killed
    in the midst, `actor` a part that a whole process plays: "stranger" has no token, "late" has it and claims a place that is taken,
    "squatter" holds the port before process 0.
    `own_port` spares the ports that Gloo opens for JAX: it ends its process when the hard limit of open files is reached.
    """

    name: str
    when: str
    move: Move = nothing
    limit: int = 0
    dies: int = -1
    actor: str = ""
    own_port: bool = False


ATTACKS = (
    Attack("nothing", "running"),
    Attack("random bytes to every port", "running", garbage),
    Attack("rows without the token", "running", sends(*(row + b"\n" for row in _ROWS))),
    Attack("deeply nested JSON, process 1 killed", "running", sends(b"[" * 200_000 + b"\n", keeps=True), dies=1),
    Attack("no attack, process 1 killed", "running", dies=1),
    Attack("a line without end", "running", endless),
    Attack("200 half-open connections, process 1 killed", "running", holds(200), dies=1),
    Attack("600 scans at 512 files, process 1 killed", "running", scans(600), limit=512, dies=1),
    Attack("400 connections at 256 files, process 1 killed", "running", holds(400), limit=256, dies=1),
    Attack("random bytes", "meeting", garbage),
    Attack("10 silent connections", "meeting", holds(10)),
    Attack("old words: another number of processes", "meeting", sends(b"spmdctx 1 3\n", keeps=True)),
    Attack("old words: process 1", "meeting", sends(b"spmdctx 1 2\n", keeps=True)),
    Attack("old words: process 77", "meeting", sends(b"spmdctx 77 2\n", keeps=True)),
    Attack("300 connections at 256 files", "meeting", holds(300), limit=256, own_port=True),
    Attack("20 slow senders", "meeting", slow),
    Attack("deeply nested JSON", "meeting", sends(b"[" * 200_000 + b"\n", keeps=True)),
    Attack("a line without end", "meeting", endless),
    Attack("a proof by a wrong key", "meeting", says(*[_wrong_key] * 20)),
    Attack("a recorded proof again", "meeting", says(*[_replayed] * 20)),
    Attack("process 0's own answer sent back", "meeting", says(*[_reflected] * 20)),
    Attack("forged ends and failures", "meeting", says(*[_forged_rows] * 20)),
    Attack("the key, but another number of processes", "meeting", says(hello(1, 3))),
    Attack("the key, but the place of process 0", "meeting", says(hello(0, 2))),
    Attack("600 connections reset", "meeting", scans(600, reset=True)),
    Attack("TLS, HTTP and HTTP/2", "meeting", sends(_TLS, b"GET / HTTP/1.1\r\n\r\n", _HTTP2, times=10, keeps=True)),
    Attack("a process without the token", "meeting", actor="stranger"),
    Attack("a false process 0 before the true one", "meeting", actor="squatter"),
    Attack("200 connections kept, process 1 killed later", "meeting", holds(200), dies=1),
    Attack("a process with the token claims place 1", "running", actor="late"),
    Attack("20 slow senders, process 0 killed", "running", slow, dies=0),
    Attack("300 connections at 256 files, files opened after", "running", holds(300), limit=256, own_port=True),
    Attack("600 connections reset", "running", scans(600, reset=True)),
    Attack(
        "TLS, HTTP and HTTP/2, process 1 killed", "running", sends(_TLS, b"GET / HTTP/1.1\r\n\r\n", _HTTP2, times=10, keeps=True), dies=1
    ),
)
"""The first 14 have been found before; 20 more follow."""
