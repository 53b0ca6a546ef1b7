"""Lines of Gloo's own that say nothing: that a process has reached as many others as it expected."""

from __future__ import annotations

import re

_REACHED = re.compile(r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1")
_PIECES = re.compile(r"(?:\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : )*")


def is_noise(line: str) -> bool:
    """Whether a line is such a one, or pieces of several that threads have written at once; any other word makes it none."""
    text = line.rstrip("\n")
    if text.startswith("[Gloo] Rank") and text.count("[Gloo]") == 1 and text.count("Expected") == 1:
        return _REACHED.fullmatch(text) is not None
    return _PIECES.fullmatch(text) is not None and any(word in text for word in ("[Gloo] Rank", "is connected to", "Expected number"))
