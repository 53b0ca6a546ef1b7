"""Counts and sizes as people read them, for texts and messages of every unit."""

from __future__ import annotations

import re

_NOTEBOOK = re.compile(r"(?:^|/)(?:ipykernel_\d+/\d+\.py|<ipython-input-[^/]*>)$")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """`0 B`, `17.2 KiB`, `3.42 GiB`."""
    power = 0
    while abs(count) >= 1024 and power < len(_BYTES) - 1:
        count /= 1024
        power += 1
    return f"{count:.0f} B" if power == 0 else f"{three_digits(count)} {_BYTES[power]}"


def exact_bytes_text(count: int) -> str:
    """The number that an option takes, with what people read: `12884901888 bytes (12.0 GiB)`; `512 bytes`."""
    number = f"{count} byte{'' if count == 1 else 's'}"
    return number if abs(count) < 1024 else f"{number} ({bytes_text(count)})"


def counted(count: int, noun: str) -> str:
    """`1 device`, `8 devices`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def three_digits(number: float) -> str:
    """The number with three significant digits, more before the point where it is large."""
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def file_text(path: str) -> str:
    """A source file's name without its folder; `cell` for what IPython makes of a notebook's cell."""
    path = path.replace("\\", "/")
    return "cell" if _NOTEBOOK.search(path) else path.rsplit("/", 1)[-1]
