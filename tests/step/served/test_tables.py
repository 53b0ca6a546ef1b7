"""Tables that servers make and hold by rows, in a job that is scaled and loses a server."""

import jax
import pytest

from benchmarks.ps_jobs import Running
from spmdctx.server.engine.client import NUM_WORKERS, WORKER
from spmdctx.server.scale import scale
from spmdctx.step.served import entry
from tests.server import tables
from tests.server.local import LocalClient

pytest.importorskip("ray")
STEPS = 20


@pytest.fixture(scope="module")
def undisturbed():
    """The losses and the last state of a job with no engine, whose steps have two parts."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setenv(WORKER, "0")
        patch.setenv(NUM_WORKERS, "2")
        patch.setattr(entry, "Client", LocalClient)
        step, state = tables.made()
        losses = {}
        for number in range(STEPS):
            state, loss = step(state, tables.batch(number))
            losses[number] = {float(loss).hex()}
        return losses, tables.digest(state)


def test_rows_leave_no_trace_of_losses_and_scaling(tmp_path, undisturbed):
    job = ["--servers", "2", "--workers", "2", "--folder", tmp_path, "--timeout", "100", "-m", "tests.server.tables", str(STEPS)]
    with Running(job) as running:
        running.wait_for(5)
        running.kill("Server", 1)
        running.wait_for(10)
        scale(tmp_path, servers=3, workers=2)
        assert running.finish() == 0, running.other
    assert (running.losses, set(running.states)) == (undisturbed[0], {undisturbed[1]})
