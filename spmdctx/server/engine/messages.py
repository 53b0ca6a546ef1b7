"""What the scheduler, workers and whoever has launched the job say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spmdctx.server.state.progress import Reply

Line = tuple[int, str, str]
"""A worker, its stream ("out" or "err"), and the text."""


WORKERS = -1
"""Stands for a server's number where workers have saved what stays with them."""


class Answer(NamedTuple):
    """A reply to a worker; it keeps the inputs of steps from `kept_from` on, and asks for servers whose edition is another one."""

    reply: Reply | None
    kept_from: int
    edition: int = 0


class Word(NamedTuple):
    """What a worker says of parts that it has pushed to all servers.

    Attributes:
        generation: in which it was.
        edition: of the servers that it knew.
        step: of the parts.
        parts: their numbers.
        results: of the step, by number.
        late: in "async", how many updates they were late at most.
        num_bytes: that it has exchanged with servers since its last word.
    """

    generation: int
    edition: int
    step: int
    parts: Sequence[int]
    results: Mapping[int, Any]
    late: int
    num_bytes: int


class Roll(NamedTuple):
    """How many workers have begun, for how many seconds nothing was heard of each that has not ended, and why the job cannot go on."""

    num_begun: int
    silence: Mapping[int, float]
    failure: str


class Lines:
    """The lines that nobody has taken yet."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._num_taken = 0

    def add(self, worker: int, stream: str, lines: Sequence[str]) -> None:
        """Takes lines of a worker."""
        self._lines += [(worker, stream, line) for line in lines]

    def after(self, number: int) -> list[Line]:
        """Returns the lines after so many of all; those before are kept no longer."""
        del self._lines[: number - self._num_taken]
        self._num_taken = number
        return list(self._lines)
