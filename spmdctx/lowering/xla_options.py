"""Compile options per backend: the compilers know different names, and refuse those they do not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from spmdctx.errors import UnsupportedError

_OPTIONS: dict[str, dict[str, int | str]] = {"cpu": {}, "gpu": {}, "tpu": {}}
"""What is set for every program. Nothing: XLA's defaults hold."""


class _Device(Protocol):
    @property
    def platform(self) -> str: ...


def backend_of(devices: Iterable[_Device]) -> str:
    """The compiler behind a list of devices, real or compile-only: "cpu", "gpu" or "tpu".

    Raises:
        UnsupportedError: The devices are of several backends, of an unknown one, or none at all.
    """
    platforms = sorted({device.platform for device in devices})
    if len(platforms) != 1 or platforms[0] not in _OPTIONS:
        raise UnsupportedError("A program is compiled for one backend.", got=", ".join(platforms) or "no devices", need=", ".join(_OPTIONS))
    return platforms[0]


def compile_options(devices: Iterable[_Device]) -> dict[str, int | str]:
    """`compiler_options=` of `jax.jit` for these devices; its keys are the backend's own."""
    return dict(_OPTIONS[backend_of(devices)])
