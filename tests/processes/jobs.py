"""Jobs of several processes in the tests: with a hard limit, and killed as a whole."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from spmdctx.communication.launch import Job, run_job


def run_module(module, arguments, processes, devices=1, *, timeout_s, succeeds=True):
    """Runs a module of the tests as a job; returns its exit code and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    outcome = run_job(Job(["-m", module, *arguments], processes, devices, timeout_s), out, err)
    written = out.getvalue(), err.getvalue() + outcome.trouble
    if succeeds:
        assert outcome.code == 0, "\n".join(written)
    return outcome.code, *written


def run_as_started(module, arguments, variables, *, timeout_s):
    """Runs a process of a module for each mapping of environment variables, which alone tell it of its job; returns what each wrote.

    Variables of other launchers, and whatever the tests themselves run under, are taken out.
    """
    foreign = ("OMPI_", "PMIX_", "SLURM_", "SPMDCTX_", "NPROC", "XLA_FLAGS")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**environ, **own},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for own in variables
    ]
    end = time.monotonic() + timeout_s
    try:
        written = [process.communicate(timeout=max(0.1, end - time.monotonic()))[0] for process in running]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(written)
    return written
