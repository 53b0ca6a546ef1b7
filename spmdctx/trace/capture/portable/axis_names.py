"""Explains axis names that nothing binds, as a step has that was written for `pmap`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from spmdctx.errors import UnsupportedError
from spmdctx.wording import file_text

_UNBOUND = re.compile(r"unbound axis name: (.+?)(?:\. |$)")
_LIBRARIES = frozenset({"spmdctx", "jax", "jaxlib", "flax", "optax", "haiku", "equinox"})


@contextmanager
def explaining_axis_names() -> Iterator[None]:
    """Makes JAX's error on an unbound axis name say which line it is about and what to do.

    Raises:
        UnsupportedError: a collective over an axis that is neither of a vmap nor of a shard_map.
    """
    try:
        yield
    except NameError as error:
        found = _UNBOUND.search(str(error))
        if found is None:
            raise
        name = found[1].strip("'\"")
        raise UnsupportedError(
            f"The step names the axis '{name}', which nothing in it binds.",
            where=_line(error.__traceback__),
            got=f"a collective, axis_index or axis_name= over '{name}', as a step for jax.pmap has it",
            need="a step of the whole batch: arrays in it are global, and spmdctx splits them",
            fix="take it out: jnp.mean over the batch is the mean over all devices, gradients and BatchNorm and DynamicScale without "
            f"axis_name= included; or bind the axis yourself, with jax.vmap(fn, axis_name='{name}')",
        ) from error


def _line(traceback: TracebackType | None) -> str:
    """Returns the innermost line of the user's own code in a traceback."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    own = [(frame, line) for frame, line in frames if _is_own(frame)]
    if not own:
        return ""
    frame, line = own[-1]
    return f"{file_text(frame.f_code.co_filename)}:{line} ({frame.f_code.co_name})"


def _is_own(frame: FrameType) -> bool:
    """Returns whether a frame is of neither Python's nor a library's code."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _LIBRARIES and package not in sys.stdlib_module_names
