"""Jobs whose workers and servers are killed, and which are scaled, come to the bits of one that was left alone."""

import hashlib
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import ps_work
from benchmarks.ps_jobs import Running
from spmdctx.server.scale import scale
from tests.server import local

pytest.importorskip("ray", reason="Ray is an extra")
STEPS = 60


@pytest.fixture(scope="module")
def undisturbed():
    """The losses and the last state of a job with no engine, whose steps have three parts."""
    return local.undisturbed(3, STEPS, ps_work.made, digest_of)


def digest_of(state):
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))).hexdigest()


def run(folder, *arguments):
    return Running([*arguments, "--folder", folder, "--timeout", "200", "-m", "benchmarks.ps_work", str(STEPS), "--pause", "0.02"])


def check(job, undisturbed):
    code = job.finish()
    assert code == 0, job.other
    assert job.other == []
    assert (job.losses, set(job.states)) == (undisturbed[0], {undisturbed[1]})


def test_losses_and_scaling_leave_no_trace(tmp_path, undisturbed):
    with run(tmp_path, "--servers", "2", "--workers", "3") as job:
        job.wait_for(5)
        job.kill("Worker", 1)
        job.wait_for(15)
        job.kill("Server", 1)
        job.wait_for(30)
        scale(tmp_path, servers=3, workers=2)
        check(job, undisturbed)
    assert len(job.states) == 2


def test_a_job_whose_driver_is_killed_goes_on_when_it_is_submitted_again(tmp_path, undisturbed):
    with run(tmp_path, "--servers", "1", "--workers", "3") as job:
        job.wait_for(33)
        left = job.pids("Worker") + job.pids("Server")
        job.stop()
    assert len(left) == 4
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < end, "processes outlive their job"
        time.sleep(0.1)
    with run(tmp_path, "--servers", "3", "--workers", "2") as job:
        check(job, undisturbed)


def test_a_state_that_cannot_be_saved_ends_the_job_with_one_error(tmp_path):
    (tmp_path / "state-000000010").write_text("no folder can be made here")
    with run(tmp_path, "--servers", "1", "--workers", "1") as job:
        assert job.finish() == 1
    assert job.other[0].startswith("error: Server 0 cannot save its arrays")
    assert "state-000000010" in " ".join(job.other)
    assert sum("error" in line for line in job.other) == 1
