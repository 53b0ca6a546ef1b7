"""The line that shows on a terminal how far a job has come, and how fast it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from spmdctx.server.state.progress import Summary
from spmdctx.wording import bytes_text, counted

_EVERY_S = 1.0


class Display:
    """A line below what workers write; nothing where the stream is no terminal.

    Args:
        stream: to which it is written.
        force: writes it to a stream that is no terminal, too.
    """

    def __init__(self, stream: IO[str], *, force: bool = False) -> None:
        self._console = Console(file=stream, force_terminal=force or None)
        self._live: Live | None = None
        self._before: tuple[float, Summary] | None = None

    def show(self, summary: Callable[[], Summary | None], now: float) -> None:
        """Renews the line, at most once a second.

        Args:
            summary: returns how far the job has come.
            now: seconds of a clock.
        """
        if not self._console.is_terminal or (self._before is not None and now - self._before[0] < _EVERY_S):
            return
        found = summary()
        if found is None:
            return
        text = Text(line_of(found, self._before, now), no_wrap=True, overflow="ellipsis")
        self._before = now, found
        if self._live is None:
            self._live = Live(text, console=self._console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(text, refresh=True)

    def hide(self) -> None:
        """Removes the line, so that something else can be written."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def line_of(summary: Summary, before: tuple[float, Summary] | None, now: float) -> str:
    """Returns what the line says.

    Args:
        summary: how far the job has come.
        before: when the line was last made, and of what.
        now: seconds of the same clock.
    """
    unit = "step" if summary.mode == "sync" else "update"
    found = [counted(summary.version, unit)]
    if before is not None and now > before[0]:
        seconds = now - before[0]
        rates = max(0, summary.version - before[1].version) / seconds, max(0, summary.num_bytes - before[1].num_bytes) / seconds
        found += [f"{rates[0]:.1f} {unit}s/s", f"{bytes_text(rates[1])}/s"]
    found += [f"{counted(summary.num_parts, 'part')} a step", counted(summary.workers, "worker"), counted(summary.servers, "server")]
    if summary.staleness:
        updates = sum(summary.staleness.values())
        mean = sum(late * count for late, count in summary.staleness.items()) / updates
        found.append(f"late by {mean:.1f} updates, at most {max(summary.staleness)}")
    if len(set(summary.steps.values())) > 1:
        found.append(f"workers in steps {min(summary.steps.values())} to {max(summary.steps.values())}")
    return ", ".join(found)
