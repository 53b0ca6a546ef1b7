"""Tracebacks without the frames of spmdctx and JAX, so that an error of a step ends at the user's own line.

`JAX_TRACEBACK_FILTERING=off`, which shows the frames of JAX, shows those of spmdctx too.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import TracebackType

import jax

from spmdctx.errors import is_laid_out

_PACKAGE = Path(__file__).parents[2]
_HIDDEN = (f"{_PACKAGE}/", f"{Path(jax.__file__).parent}/", functools.__file__, contextlib.__file__)
_SHOWN = f"{_PACKAGE}/models/"
"""Models are what a user's step calls, wherever they come from."""


class ShortTracebacks:
    """A context that takes the hidden frames out of an error's traceback, and out of those of the errors before it."""

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or jax.config.values["jax_traceback_filtering"] == "off":
            return
        seen: set[int] = set()
        before: BaseException | None = error
        while before is not None and id(before) not in seen:
            seen.add(id(before))
            before.__traceback__ = _shown(before.__traceback__, keep_all=not is_laid_out(before))
            before = before.__cause__ or before.__context__


def _shown(trace: TracebackType | None, keep_all: bool) -> TracebackType | None:
    """Returns the frames that are not hidden; all if that leaves none of an error which may be a fault of spmdctx itself."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    own = [frame for frame in frames if not _is_hidden(frame.tb_frame.f_code.co_filename)]
    found: TracebackType | None = None
    for frame in reversed(own or (frames if keep_all else [])):
        found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found


def _is_hidden(file: str) -> bool:
    return file.startswith(_HIDDEN) and not file.startswith(_SHOWN)
