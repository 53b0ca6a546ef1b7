"""The devices on which a command runs: those of the job if a launcher started it, else those of this process."""

from __future__ import annotations

import contextlib
import os
import re

import jax

from spmdctx import communication
from spmdctx.cli.parser.program import DEFAULT_DEVICES
from spmdctx.communication.clusters import detect

_XLA_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def expected_devices() -> int:
    """Returns how many CPU devices there will be if nothing else says how many.

    JAX_NUM_CPU_DEVICES or XLA_FLAGS give the number for each process of the job. Without them each process of a job has one
    device, and a single process has eight.

    Raises:
        ContextError: the environment describes only part of a job.
    """
    cluster, own = detect(os.environ), _asked_devices()
    if cluster is None:
        return own or DEFAULT_DEVICES
    return (own or 1) * cluster.num_processes


def start_devices(num_devices: int) -> None:
    """Gives this process its CPU devices, and enters its job; accelerators are used instead if there are any.

    The number that the environment asks for stands; else it is `num_devices`, dealt out to the processes. Comes before JAX's first use.

    Raises:
        ContextError: the environment describes half a job.
        CommunicationError: the processes of the job do not come together.
    """
    cluster = detect(os.environ)
    if not _asked_devices():
        with contextlib.suppress(RuntimeError):  # JAX has started; a call that needs more devices will say so
            jax.config.update("jax_num_cpu_devices", max(1, num_devices // (1 if cluster is None else cluster.num_processes)))
    if cluster is not None:
        communication.init()


def _asked_devices() -> int | None:
    """Returns the number of CPU devices of this process that the environment asks for."""
    found = _XLA_COUNT.search(os.environ.get("XLA_FLAGS", ""))
    count = int(found[1]) if found else int(jax.config.values["jax_num_cpu_devices"])
    return count if count > 0 else None
