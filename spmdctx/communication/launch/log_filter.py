"""Filters log lines in which Gloo says only that a process has reached as many others as it expected."""

from __future__ import annotations

import re

_START = "[Gloo] Rank"
_REACHED = re.compile(r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1")
_PIECES = re.compile(r"(?:\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : )*")


class ConnectionReports:
    """Tells such lines of one stream, and those that consist of pieces of several, which threads wrote at once.

    A line with any other word is none. One without a word is none either, unless a report's end of line is still to come.
    """

    def __init__(self) -> None:
        self._open = 0

    def has(self, line: str) -> bool:
        """Returns whether the stream's next line says no more than this."""
        text = line.rstrip("\n")
        starts = text.count(_START)
        if starts == 1 and text.startswith(_START) and text.count("Expected") == 1:
            return _REACHED.fullmatch(text) is not None
        if _PIECES.fullmatch(text) is None:
            return False
        named = any(word in text for word in ("[Gloo] Rank", "is connected to", "Expected number"))
        if not named and not self._open:
            return False
        self._open = max(0, self._open + starts - line.endswith("\n"))
        return True
