"""The lines that workers have written, until whoever has launched the job has taken them."""

from __future__ import annotations

from collections.abc import Sequence

Line = tuple[int, str, str]
"""A worker, its stream ("out" or "err"), and the text."""


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
