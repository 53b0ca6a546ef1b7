"""A job as its pods run it: two processes with two devices each, with exactly what the manifest and the operator tell them."""

import pytest

from spmdctx.errors import SAVED
from spmdctx.k8s import JobOptions, manifests
from spmdctx.k8s.job.options import Pods
from tests.k8s.pods import play
from tests.processes.jobs import run_module

NUM_STEPS, LAST = 6, 3
MODULE = "tests.processes.work_train"


def losses(folder):
    return (folder / "losses.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """The folders of a training by `launch` and of one by pods, of which one gets SIGTERM, and how these have ended both times."""
    calm, ours = tmp_path_factory.mktemp("calm"), tmp_path_factory.mktemp("ours")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS")  # pods have none
        run_module(MODULE, [str(calm), str(NUM_STEPS)], 2, 2, timeout_s=180)
    ends = []
    for more in ((f"sigterm:{LAST}:1",), ()):
        command = ("-m", MODULE, str(ours), str(NUM_STEPS), *more)
        job = JobOptions("demo", "train:1", command, processes=2, devices=2, pods=Pods(token=("train", "token")))
        ends.append(play(manifests(job)[0], ours, timeout_s=180))
        if more:
            ends.append(losses(ours))
    return calm, ours, ends


def test_sigterm_to_one_pod_ends_all_with_the_documented_code(trainings):
    stopped = trainings[2][0]
    assert [code for code, _ in stopped] == [SAVED, SAVED], stopped
    assert f"SIGTERM: step {LAST} is saved; the same command run again goes on from there." in stopped[0][1]


def test_nothing_is_done_after_it(trainings):
    assert [line.split()[0] for line in trainings[2][1]] == [str(step) for step in range(1, LAST + 1)]


def test_the_restarted_job_ends_as_the_launched_one_bit_for_bit(trainings):
    calm, ours, ends = trainings
    assert [code for code, _ in ends[2]] == [0, 0], ends[2]
    assert len(losses(calm)) == NUM_STEPS
    assert losses(ours) == losses(calm)
