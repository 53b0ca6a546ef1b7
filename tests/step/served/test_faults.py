"""Jobs whose workers and servers are killed, and which are scaled, come to the bits of one that was left alone."""

import hashlib

import jax
import numpy as np
import pytest

from benchmarks import ps_work
from benchmarks.ps_jobs import Running
from spmdctx.server.engine.client import NUM_WORKERS, WORKER
from spmdctx.server.scale import scale
from spmdctx.step.served import entry
from tests.server.local import LocalClient

pytest.importorskip("ray")
STEPS = 60


@pytest.fixture(scope="module")
def undisturbed():
    """The losses and the last state of a job with no engine, whose steps have three parts."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setenv(WORKER, "0")
        patch.setenv(NUM_WORKERS, "3")
        patch.setattr(entry, "Client", LocalClient)
        step, state, batch = ps_work.made()
        losses = {}
        for number in range(STEPS):
            state, loss = step(state, batch(number))
            losses[number] = {float(loss).hex()}
        digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)))
    return losses, digest.hexdigest()


def run(folder, *arguments):
    return Running([*arguments, "--folder", folder, "--timeout", "100", "-m", "benchmarks.ps_work", str(STEPS), "--pause", "0.02"])


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
