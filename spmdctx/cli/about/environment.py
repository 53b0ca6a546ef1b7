"""`spmdctx env`: what a bug report needs, without secrets: versions, devices, variables, and options that differ from their defaults."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spmdctx import __version__
from spmdctx.cli.output import Output
from spmdctx.context.files import load_config
from spmdctx.context.options import BY_NAME
from spmdctx.context.values import plain as plain_value
from spmdctx.errors import naming_file
from spmdctx.wording import bytes_text
from spmdctx.wording.reports import Report

_PACKAGES = (
    *("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-rocm7-plugin"),
    *("flax", "optax", "orbax-checkpoint", "numpy", "scipy", "ray", "kubernetes", "grain"),
)
_VARIABLES = re.compile(
    r"XLA_|JAX_|LIBTPU_|TPU_|CUDA_|NVIDIA_VISIBLE|NCCL_|ROCM_|HIP_|TF_CPP|SPMDCTX_|MS_|RAY_|SLURM_(JOB|PROCID|NTASKS|LOCALID)|OMP_NUM"
)
_SECRET = re.compile(r"TOKEN|PASS|KEY|SECRET|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "***"


@dataclass(frozen=True)
class Environment(Report):
    """What a step runs in.

    Attributes:
        versions: of Python and of the packages that are installed, by name.
        system: the operating system and the processor.
        devices: a row for each kind of device of this process; empty where JAX finds none.
        trouble: what JAX said where it did not start.
        variables: those that JAX, its compilers and launchers read; secrets are masked.
        options: context options that differ from their defaults.
    """

    kind = "env"

    versions: Mapping[str, str]
    system: Mapping[str, Any]
    devices: tuple[Mapping[str, Any], ...]
    trouble: str
    variables: Mapping[str, str]
    options: Mapping[str, Any]

    def _figures(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        devices = [_device_text(row) for row in self.devices] or [f"none: {self.trouble}"]
        parts = {
            "versions": [f"{name} {number}" for name, number in self.versions.items()],
            "system": [f"{name}: {value}" for name, value in self.system.items()],
            "devices": devices,
            "variables": [f"{name}={value}" for name, value in self.variables.items()] or ["none"],
            "options": [f"{name}: {value!r}" for name, value in self.options.items()] or ["all at their defaults"],
        }
        return "\n".join(line for title, lines in parts.items() for line in (f"{title}:", *(f"  {one}" for one in lines)))


def env(arguments: argparse.Namespace, output: Output) -> int:
    """Prints what to paste into a bug report."""
    options: Mapping[str, Any] = {}
    if arguments.config:
        with naming_file("--config", arguments.config, "the file cannot be read"):
            options = load_config(arguments.config).options
    found = read_environment(os.environ, options)
    output.show(found)
    output.finish(found)
    return 0


def read_environment(variables: Mapping[str, str], options: Mapping[str, Any]) -> Environment:
    """Reads what there is; starts JAX, which takes hold of its devices."""
    devices, trouble = _devices()
    changed = {name: plain_value(value) for name, value in options.items() if plain_value(value) != plain_value(BY_NAME[name].default)}
    system = {"platform": platform.platform(), "machine": platform.machine(), "processors": os.cpu_count()}
    return Environment(_versions(), system, devices, trouble, shown_variables(variables), changed)


def _versions() -> dict[str, str]:
    found = {"spmdctx": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def shown_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter, by name; those whose names tell of secrets are masked, and so are users in addresses."""
    found = {name: variables[name] for name in sorted(variables) if _VARIABLES.match(name)}
    return {name: _MASK if _SECRET.search(name) else _USER_OF_ADDRESS.sub(_MASK, text) for name, text in found.items()}


def _devices() -> tuple[tuple[Mapping[str, Any], ...], str]:
    """Returns a row for each kind of device, or what kept JAX from starting."""
    try:
        import jax
        from jax.extend.backend import get_backend

        rows: dict[tuple[str, str, int | None], int] = {}
        for device in jax.local_devices():
            limit = (device.memory_stats() or {}).get("bytes_limit")
            own = device.platform, device.device_kind, limit
            rows[own] = rows.get(own, 0) + 1
        backend = get_backend().platform_version
    except Exception as error:
        return (), f"{type(error).__name__}: {error}"
    names = ("platform", "kind", "memory_bytes")
    return tuple({**dict(zip(names, own, strict=True)), "count": count, "runtime": backend} for own, count in rows.items()), ""


def _device_text(row: Mapping[str, Any]) -> str:
    memory = f", {bytes_text(row['memory_bytes'])} each" if row["memory_bytes"] else ""
    return f"{row['count']} x {row['kind']} ({row['platform']}{memory}; {row['runtime']})"
