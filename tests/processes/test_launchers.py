"""One script, unchanged, under `spmdctx launch`, Open MPI's mpirun and Slurm's srun."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.jobs import run_module

SCRIPT = "tests.processes.work_anywhere"
LINES = {f"rank {rank} of 4, loss 4.43331" for rank in (0, 2)}
LIMIT_S = 200
ROOT = Path(__file__).parents[2]


def run(command):
    """Runs a launcher's command with a hard limit; kills its processes as a group. What it wrote."""
    environ = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    process = subprocess.Popen(
        command,
        env={**environ, "JAX_NUM_CPU_DEVICES": "2"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        written, _ = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, written
    return written


def losses(written):
    return {line[line.index("rank") :] for line in written.splitlines() if " loss " in line}


def test_under_spmdctx_launch():
    _, out, _ = run_module(SCRIPT, [], 2, 2, timeout_s=LIMIT_S)
    assert losses(out) == LINES


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_under_mpirun():
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    assert losses(run(["mpirun", *as_root, "--oversubscribe", "-n", "2", sys.executable, "-m", SCRIPT])) == LINES


def has_slurm():
    """Whether a Slurm controller answers."""
    return shutil.which("sinfo") is not None and subprocess.run(["sinfo"], capture_output=True, timeout=30).returncode == 0


@pytest.mark.skipif(not has_slurm(), reason="no Slurm controller answers")
def test_under_srun():
    assert losses(run(["srun", "-n", "2", "--overcommit", sys.executable, "-m", SCRIPT])) == LINES


def test_alone():
    """Without a launcher the world is one process."""
    assert run([sys.executable, "-m", SCRIPT]).strip().endswith("rank 0 of 2, loss 4.43331")
