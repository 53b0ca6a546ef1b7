"""The environment of a job's processes."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping

_XLA_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*\s*")


def free_port() -> int:
    """Returns a port of this machine on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def new_token() -> str:
    """Returns a secret for one job: 256 random bits, in hexadecimal."""
    return secrets.token_hex(32)


def xla_flags(environ: Mapping[str, str]) -> str:
    """Returns the user's flags for XLA, without the count of CPU devices: JAX refuses to be given two."""
    return _XLA_COUNT.sub("", environ.get("XLA_FLAGS", "")).strip()


def process_environment(  # what a process is told
    environ: Mapping[str, str], port: int, count: int, process: int, devices: int, token: str = ""
) -> dict[str, str]:
    """Returns the environment of one process, with `devices` CPU devices or GPUs of its own.

    The token of the job, if one is given, stands nowhere else: other users cannot read the environment of a process.
    """
    own = {
        "SPMDCTX_ADDRESS": f"127.0.0.1:{port}",
        "SPMDCTX_NUM_PROCESSES": str(count),
        "SPMDCTX_PROCESS_ID": str(process),
        "SPMDCTX_LAUNCHER": str(os.getpid()),
        "SPMDCTX_LOCAL_DEVICE_IDS": ",".join(str(process * devices + index) for index in range(devices)),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONUNBUFFERED": "1",
    }
    if token:
        own["SPMDCTX_TOKEN"] = token
    return {**environ, **own, "XLA_FLAGS": xla_flags(environ)}
