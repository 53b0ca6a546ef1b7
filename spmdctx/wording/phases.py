"""Says what is going on: a log of phases, and one line in terminals and notebooks while a search takes long.

The clock decides only when the line appears, never what a search finds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_PATIENCE_S = 2.0
"""Shorter searches show no line."""

logging.getLogger("spmdctx").addHandler(logging.NullHandler())


def log_of(phase: str) -> logging.Logger:
    """Returns the logger of a phase, below "spmdctx"; nothing is printed unless the user's program sets up logging."""
    return logging.getLogger(f"spmdctx.{phase}")


class Line:
    """A line about work that goes on; it appears on standard error once the work has taken two seconds, in terminals and notebooks only."""

    def __init__(self, begin: str) -> None:
        self._begin, self._text = begin, begin
        self._lock = threading.Lock()
        self._shown: Any = None
        self._timer = threading.Timer(_PATIENCE_S, self._show)
        self._timer.daemon = True

    def start(self) -> None:
        """Begins to wait."""
        self._timer.start()

    def tell(self, text: str) -> None:
        """Says how far the work is."""
        self._text = f"{self._begin}: {text}"
        with self._lock:
            if self._shown is not None:
                self._shown.update(self._text)

    def end(self) -> None:
        """Removes the line."""
        self._timer.cancel()
        with self._lock:
            if self._shown is not None:
                self._shown.stop()
            self._shown, self._text = None, ""

    def _show(self) -> None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False)
        with self._lock:
            if self._text and console.is_jupyter:
                self._shown = _Cell(self._text)
            elif self._text and console.is_terminal:
                self._shown = console.status(self._text)
                self._shown.start()


class _Cell:
    """A line in the output of a notebook's cell; that of rich needs widgets there."""

    def __init__(self, text: str) -> None:
        from IPython.display import display

        self._handle: Any = display({"text/plain": text}, raw=True, display_id=True)

    def update(self, text: str) -> None:
        self._handle.update({"text/plain": text}, raw=True)

    def stop(self) -> None:
        self.update("")


_TELL: ContextVar[Callable[[str], None] | None] = ContextVar("tell", default=None)


def tell(text: str) -> None:
    """Says how far the work is, where something shows that."""
    own = _TELL.get()
    if own is not None:
        own(text)


@contextmanager
def telling(show: Callable[[str], None]) -> Iterator[None]:
    """Has `show` say how far the work inside is."""
    token = _TELL.set(show)
    try:
        yield
    finally:
        _TELL.reset(token)


@contextmanager
def line(begin: str) -> Iterator[None]:
    """Shows a line about the work inside, once it has taken two seconds, unless something else shows how far the work is."""
    if _TELL.get() is not None or "PYTEST_CURRENT_TEST" in os.environ:
        yield
        return
    own = Line(begin)
    own.start()
    try:
        with telling(own.tell):
            yield
    finally:
        own.end()
