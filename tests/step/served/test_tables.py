"""Tables that servers make and hold by rows, in a job that is scaled and loses a server."""

import pytest

from benchmarks.ps_jobs import Running
from spmdctx.server.scale import scale
from tests.server import local, tables

pytest.importorskip("ray", reason="Ray is an extra")
STEPS = 20


@pytest.fixture(scope="module")
def undisturbed():
    """The losses and the last state of a job with no engine, whose steps have two parts."""
    return local.undisturbed(2, STEPS, lambda: (*tables.made(), tables.batch), tables.digest)


def test_rows_leave_no_trace_of_losses_and_scaling(tmp_path, undisturbed):
    job = ["--servers", "2", "--workers", "2", "--folder", tmp_path, "--timeout", "100", "-m", "tests.server.tables", str(STEPS)]
    with Running(job) as running:
        running.wait_for(5)
        running.kill("Server", 1)
        running.wait_for(10)
        scale(tmp_path, servers=3, workers=2)
        assert running.finish() == 0, running.other
    assert (running.losses, set(running.states)) == (undisturbed[0], {undisturbed[1]})
