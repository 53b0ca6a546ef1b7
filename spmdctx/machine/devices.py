"""Finds the compiler's backend and the machine to plan for, from the attributes of JAX devices alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from spmdctx.errors import UnsupportedError
from spmdctx.machine.presets import topology
from spmdctx.machine.topology import Topology

_BACKENDS = ("cpu", "gpu", "tpu")


class Device(Protocol):
    """A device as far as its backend matters."""

    @property
    def platform(self) -> str:
        """Returns the name of the device's backend."""


def backend_of(devices: Iterable[Device]) -> str:
    """Returns the compiler behind a list of devices, real or compile-only: "cpu", "gpu" or "tpu".

    Raises:
        UnsupportedError: The devices are of several backends, of an unknown one, or none at all.
    """
    platforms = sorted({device.platform for device in devices})
    if len(platforms) != 1 or platforms[0] not in _BACKENDS:
        raise UnsupportedError(
            "A program is compiled for one backend.", got=", ".join(platforms) or "no devices", need=", ".join(_BACKENDS)
        )
    return platforms[0]


_PRESET_OF_WORD = (
    ("cpu", "cpu"),
    ("v5 lite", "tpu-v5e"),
    ("v5e", "tpu-v5e"),
    ("v5", "tpu-v5p"),
    ("v6", "tpu-v6e"),
    ("h200", "h200"),
    ("h100", "h100"),
    ("a100", "a100"),
)

_PRESET_OF_PLATFORM = {"tpu": "tpu-v5p", "gpu": "h100", "cuda": "h100"}


def default_topology(device: Any) -> tuple[Topology, tuple[str, ...]]:
    """Returns the preset for a device, and a note if it is a guess."""
    kind = str(getattr(device, "device_kind", "cpu")).lower()
    for word, name in _PRESET_OF_WORD:
        if word in kind:
            return topology(name), ()
    name = _PRESET_OF_PLATFORM.get(str(getattr(device, "platform", "cpu")), "cpu")
    return topology(name), (f"topology: no figures for {kind!r}; those of {name!r} are used.",)
