"""Says why a step is planned again: what differs from the call before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol

from spmdctx.context.options import OPTIONS
from spmdctx.context.values import plain
from spmdctx.trace.capture.arguments import Static
from spmdctx.wording import tensor_text
from spmdctx.wording.phases import log_of

_LOG = log_of("plan")
_MOST = 4


class _Called(Protocol):
    """The entry of a call, and its static arguments."""

    @property
    def entry(self) -> Any: ...
    @property
    def static(self) -> Static: ...


def log_entry(name: str, entry: Any, static: Static, before: _Called | None, *, is_new: bool) -> None:
    """Logs that a step is planned, or why again, or that it was planned before for such arguments.

    Args:
        name: the step's.
        entry: that of the call.
        static: its static arguments.
        before: the call before, None if there was none.
        is_new: whether the entry is not planned yet.
    """
    if before is None or before.entry is entry or not _LOG.isEnabledFor(logging.INFO):
        return
    changes = list(_changes(before.entry, entry)) + (["static arguments"] if before.static != static else [])
    rest = len(changes) - _MOST
    told = "; ".join(changes[:_MOST] + ([f"and {rest} more"] if rest > 0 else [])) or "the 64-bit mode of JAX"
    if is_new:
        _LOG.info("%s is planned again, because this changed: %s.", name, told)
    else:
        _LOG.info("%s was planned before for what changed back: %s.", name, told)


def _changes(before: Any, after: Any) -> Iterator[str]:
    """Gives what differs between two entries: options, devices, machine, and arguments."""
    old, new = before.environment, after.environment
    yield from _options(old.settings, new.settings)
    if old.devices != new.devices:
        yield "the devices"
    for field in ("num_devices", "mesh", "memory_bytes"):
        values = getattr(old.settings, field), getattr(new.settings, field)
        if values[0] != values[1]:
            yield f"{field} {values[0]} -> {values[1]}"
    if old.settings.topology != new.settings.topology:
        yield f"topology {old.settings.topology.device} -> {new.settings.topology.device}"
    yield from _arguments(before.captured, after.captured)


def _options(before: Any, after: Any) -> Iterator[str]:
    for option in OPTIONS:
        values = [plain(settings.context.value(option)) for settings in (before, after)]
        if values[0] != values[1] and not option.same_as:
            yield f"{option.name} {values[0]!r} -> {values[1]!r}"
    for name in ("algo", "servers"):
        if getattr(before.context, name) != getattr(after.context, name):
            yield f"the {'algorithm parameters' if name == 'algo' else 'options of servers'}"


def _arguments(before: Any, after: Any) -> Iterator[str]:
    old = {leaf.path: aval for leaf, aval in zip(before.inputs, before.in_avals, strict=True)}
    new = {leaf.path: aval for leaf, aval in zip(after.inputs, after.in_avals, strict=True)}
    for path, aval in new.items():
        known = old.get(path)
        if known is None:
            yield f"{path} is new"
        elif (known.shape, known.dtype) != (aval.shape, aval.dtype):
            yield f"{path} {_text(known)} -> {_text(aval)}"
        elif known.weak_type != aval.weak_type:
            yield f"{path} is {'' if aval.weak_type else 'not '}of a weak type"
    yield from (f"{path} is gone" for path in old.keys() - new.keys())


def _text(aval: Any) -> str:
    return tensor_text(tuple(aval.shape), str(aval.dtype))
