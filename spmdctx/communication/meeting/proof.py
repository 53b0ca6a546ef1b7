"""The words of the meeting: both sides prove that they have the job's key, and no recorded word proves anything again.

1. Process 0: `spmdctx-2 NONCE`
2. The caller: `hello PROCESS COUNT NONCE PROOF`
3. Process 0: `welcome PROOF`, or `refused PROOF WORDS`
4. Both, from then on: `PROOF TEXT`

A proof is an HMAC (SHA-256) over the speaker's role, both nonces and what the line says. Those of step 4 use a key of this connection
and the number of the line. Every line is ASCII or UTF-8, at most `LINE_BYTES` long, and read without any parser of nested data.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import NamedTuple

LINE_BYTES = 4096
MOST_DIGITS = 9

_GREETING = b"spmdctx-2"
_NONCE_BYTES = 16
_HELLO = re.compile(rb"hello ([0-9]{1,%d}) ([0-9]{1,%d}) ([0-9a-f]{%d}) ([0-9a-f]{64})\n" % (MOST_DIGITS, MOST_DIGITS, 2 * _NONCE_BYTES))
_GREETED = re.compile(rb"%s ([0-9a-f]{%d})\n" % (_GREETING, 2 * _NONCE_BYTES))
_ANSWER = re.compile(rb"(welcome|refused) ([0-9a-f]{64})(?: ([^\n]*))?\n")
_ROW = re.compile(rb"([0-9a-f]{64}) ([^\n]*)\n")


class Caller(NamedTuple):
    """A process that has proved that it has the key."""

    process: int
    num_processes: int
    nonce: bytes


def new_nonce() -> bytes:
    """Returns a number that is used once, in hexadecimal."""
    return secrets.token_hex(_NONCE_BYTES).encode()


def greeting(nonce: bytes) -> bytes:
    """Returns line 1."""
    return b"%s %s\n" % (_GREETING, nonce)


def read_greeting(line: bytes) -> bytes | None:
    """Returns process 0's nonce, or None if this is no such line."""
    found = _GREETED.fullmatch(line)
    return None if found is None else found[1]


def hello(key: bytes, greeted: bytes, caller: Caller) -> bytes:
    """Returns line 2, in answer to the nonce that process 0 `greeted` with."""
    return b"hello %d %d %s %s\n" % (*caller, _hello_proof(key, greeted, caller))


def read_hello(key: bytes, greeted: bytes, line: bytes) -> Caller | None:
    """Returns who calls, or None if the line does not prove that the caller has the key."""
    found = _HELLO.fullmatch(line)
    if found is None:
        return None
    caller = Caller(int(found[1]), int(found[2]), found[3])
    return caller if hmac.compare_digest(_hello_proof(key, greeted, caller), found[4]) else None


def answer(key: bytes, greeted: bytes, caller: Caller, refusal: str) -> bytes:
    """Returns line 3: a welcome, or a refusal in words."""
    words = _one_line(refusal)
    if not words:
        return b"welcome %s\n" % _answer_proof(key, b"welcome", greeted, caller, b"")
    return b"refused %s %s\n" % (_answer_proof(key, b"refused", greeted, caller, words), words)


def read_answer(key: bytes, greeted: bytes, caller: Caller, line: bytes) -> str | None:
    """Returns the words of a refusal, empty for a welcome, or None if process 0 has not said this."""
    found = _ANSWER.fullmatch(line)
    if found is None:
        return None
    words = found[3] or b""
    if not hmac.compare_digest(_answer_proof(key, found[1], greeted, caller, words), found[2]):
        return None
    return words.decode(errors="replace")


class Seal:
    """Seals, or opens, the rows of one direction of a connection.

    Args:
        key: the connection's, of `session_key`.
        speaker: "caller" or "process 0".
    """

    def __init__(self, key: bytes, speaker: str) -> None:
        self._key, self._speaker = key, speaker.encode()
        self._count = 0

    def sealed(self, text: str) -> bytes:
        """Returns the line of a text."""
        words = _one_line(text)
        line = b"%s %s\n" % (self._proof(words), words)
        self._count += 1
        return line

    def opened(self, line: bytes) -> str:
        """Returns the text of a line, empty where it is not the next one of the other side."""
        found = _ROW.fullmatch(line)
        if found is None or not hmac.compare_digest(self._proof(found[2]), found[1]):
            return ""
        self._count += 1
        return found[2].decode(errors="replace")

    def _proof(self, words: bytes) -> bytes:
        return _proof(self._key, b"row", self._speaker, b"%d" % self._count, words)


def session_key(key: bytes, greeted: bytes, caller: Caller) -> bytes:
    """Returns the key of one connection."""
    return _proof(key, b"session", greeted, caller.nonce, b"%d" % caller.process)


def _hello_proof(key: bytes, greeted: bytes, caller: Caller) -> bytes:
    return _proof(key, b"caller", greeted, caller.nonce, b"%d" % caller.process, b"%d" % caller.num_processes)


def _answer_proof(key: bytes, verdict: bytes, greeted: bytes, caller: Caller, words: bytes) -> bytes:
    return _proof(key, b"process 0", verdict, greeted, caller.nonce, b"%d" % caller.process, words)


def _proof(key: bytes, *parts: bytes) -> bytes:
    made = hmac.new(key, b"".join(b"%d:%s" % (len(part), part) for part in parts), "sha256")
    return made.hexdigest().encode()


def _one_line(text: str) -> bytes:
    return " ".join(text.split()).encode(errors="backslashreplace")[: LINE_BYTES // 2]
