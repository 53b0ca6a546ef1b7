"""Warns at the user's own line, however deep in the library or in JAX something is found out."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from spmdctx.errors import ContextWarning

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def _hidden() -> tuple[str, ...]:
    jax = find_spec("jax")
    folders = [_PACKAGE, *((jax.submodule_search_locations or ()) if jax else ())]
    return (*(f"{folder}/" for folder in folders), functools.__file__, contextlib.__file__)


def warn_user(text: str) -> None:
    """Warns of a ContextWarning at the line of the user by which this was called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_hidden()):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, ContextWarning, stacklevel=level)
