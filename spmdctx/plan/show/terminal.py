"""Makes plain text of what rich draws on a terminal."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

WIDTH = 120


def plain_text(drawn: RenderableType) -> str:
    """Returns what a terminal of 120 columns would show, without colours."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False, force_jupyter=False)
    console.print(drawn)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
