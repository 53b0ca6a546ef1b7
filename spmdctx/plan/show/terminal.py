"""Makes plain text of what rich draws on a terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console, RenderableType

WIDTH = 120

_UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""Characters that steer a terminal or turn a line around: names come from files of other people."""


def plain_text(drawn: RenderableType) -> str:
    """Returns what a terminal of 120 columns would show, without colours; characters that steer it are spelled out."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False, force_jupyter=False)
    console.print(drawn)
    text = _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], buffer.getvalue())
    return "\n".join(line.rstrip() for line in text.removesuffix("\n").split("\n"))
