"""A job whose parameters are marked in part comes to the bits of one that was left alone, though it is killed at and scaled."""

import pytest

import spmdctx
from benchmarks.ps_jobs import Running
from spmdctx.server.scale import scale
from spmdctx.server.state.folder import WORKERS_FILE, load_arrays, newest_state
from tests.server import local, mixed, tables

pytest.importorskip("ray", reason="Ray is an extra")
STEPS = 30


def test_losses_and_scaling_leave_no_trace_of_what_workers_hold(tmp_path):
    spmdctx.set_ps_context(folder=str(tmp_path / "alone"))
    losses, state = local.undisturbed(2, STEPS, mixed.made, tables.digest)
    folder = tmp_path / "job"
    job = ["--servers", "2", "--workers", "2", "--folder", folder, "--timeout", "200", "-m", "tests.server.mixed", str(STEPS)]
    with Running([*job, "--pause", "0.02"]) as running:
        running.wait_for(4)
        running.kill("Worker", 1)
        running.wait_for(12)
        running.kill("Server", 1)
        running.wait_for(16)
        scale(folder, servers=1, workers=3)
        assert running.finish() == 0, running.other
    assert (running.losses, set(running.states)) == (losses, {state})
    saved = newest_state(folder)
    assert WORKERS_FILE in saved.files
    assert load_arrays(folder, saved.version, ["state/0/w2", "state/0/w1"]).keys() == {"state/0/w1", "state/0/w2"}
