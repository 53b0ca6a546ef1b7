"""Filters log lines in which Gloo says only that a process has reached as many others as it expected."""

from __future__ import annotations

import re

_REACHED = re.compile(r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1")
_PIECES = re.compile(r"(?:\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : )*")


def is_connection_report(line: str) -> bool:
    """Returns whether a line is such a line, or consists of pieces of several that threads wrote at once.

    A line with any other word is kept.
    """
    text = line.rstrip("\n")
    if text.startswith("[Gloo] Rank") and text.count("[Gloo]") == 1 and text.count("Expected") == 1:
        return _REACHED.fullmatch(text) is not None
    return _PIECES.fullmatch(text) is not None and any(word in text for word in ("[Gloo] Rank", "is connected to", "Expected number"))
