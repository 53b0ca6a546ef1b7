"""Warns at the user's own line: the innermost one that lies outside of this package and of frameworks."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings

from spmdctx.errors import ContextWarning
from spmdctx.wording import is_framework, is_own

_BETWEEN = frozenset({contextlib.__file__, functools.__file__})


def warn_user(text: str, category: type[Warning] = ContextWarning) -> None:
    """Warns, and names the line of the user's program that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_hidden(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _is_hidden(file: str) -> bool:
    return is_own(file) or is_framework(file) or file in _BETWEEN
