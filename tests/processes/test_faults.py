"""A training whose processes are killed one after the other goes on as if nothing had happened."""

import os
import time

import pytest

from tests.processes.jobs import run_module

NUM_STEPS = 8
KILLS = (("compute", 3, 1), ("save", 4, 1), ("commit", 6, 0))
"""Where, at which step, which process."""

LIMIT_S = 15


def train(folders, *more, succeeds=True):
    arguments = [os.pathsep.join(map(str, folders)), str(NUM_STEPS), *more]
    return run_module("tests.processes.work_train", arguments, 2, 2, timeout_s=300, succeeds=succeeds)


def losses(folder):
    return [tuple(line.split()) for line in (folder / "losses.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """The folder of an undisturbed training, that of a disturbed one, and what each of its runs said and how long it took to end."""
    calm, disturbed = tmp_path_factory.mktemp("calm"), tmp_path_factory.mktemp("disturbed")
    runs = []
    for where, step, process in KILLS:
        code, _, err = train([disturbed], f"{where}:{step}:{process}", succeeds=False)
        seconds = time.time() - float((disturbed / f"killed.{step}").read_text())
        runs.append((code, err, seconds, len(losses(disturbed))))
    train([disturbed, calm])
    return calm, disturbed, runs


@pytest.mark.parametrize("number", range(len(KILLS)), ids=[where for where, _, _ in KILLS])
def test_a_killed_process_ends_the_job_with_one_clear_error_on_the_others(trainings, number):
    code, err, seconds, _ = trainings[2][number]
    process = KILLS[number][2]
    assert code == 128 + 9
    assert f"[{1 - process}] error: Process {process} is gone; process {1 - process} cannot go on without it and ends." in err
    assert err.count("error: Process") == 1
    assert f"Process {process} was killed by SIGKILL" in err.splitlines()[-1]
    assert "Check failure stack trace" not in err
    assert seconds < LIMIT_S


def test_the_losses_are_those_of_an_undisturbed_training_bit_for_bit(trainings):
    calm, disturbed, _ = trainings
    expected = losses(calm)
    assert [int(step) for step, _ in expected] == list(range(1, NUM_STEPS + 1))
    assert set(losses(disturbed)) == set(expected)


def test_nothing_is_lost_beyond_the_last_checkpoint(trainings):
    _, disturbed, runs = trainings
    steps = [int(step) for step, _ in losses(disturbed)]
    first_of_rerun = [steps[count] for *_, count in runs]
    assert first_of_rerun[1:] == [3, 5]
    assert first_of_rerun[0] in (1, 3)  # the checkpoint of step 2 may still have been on its way


def test_an_error_on_one_process_is_told_by_the_others():
    start = time.time()
    code, _, err = run_module("tests.processes.work_fails", ["error"], 2, timeout_s=90, succeeds=False)
    lines = err.splitlines()
    assert code == 1
    assert "[0] ValueError: no such file: train.txt" in lines
    assert "[1] error: Process 0 has failed; process 1 cannot go on without it and ends." in lines
    assert "[1]   got:   ValueError: no such file: train.txt" in lines
    assert lines[-1] == "Process 0 ended with exit code 1."
    assert time.time() - start < 60


def test_an_exit_on_one_process_is_told_by_the_others():
    code, _, err = run_module("tests.processes.work_fails", ["exit"], 2, timeout_s=90, succeeds=False)
    lines = err.splitlines()
    assert code == 5
    assert "[0] error: Process 1 has failed; process 0 cannot go on without it and ends." in lines
    assert "[0]   got:   it ended with exit code 5" in lines
    assert lines[-1] == "Process 1 ended with exit code 5."


def test_processes_watch_each_other_where_the_user_has_connected_jax():
    code, _, err = run_module("tests.processes.work_fails", ["beside"], 2, timeout_s=90, succeeds=False)
    assert code == 128 + 9
    assert "[0] error: Process 1 is gone; process 0 cannot go on without it and ends." in err.splitlines()


@pytest.mark.parametrize("watches", ["watched", "unwatched"])
@pytest.mark.parametrize("process", [0, 2])
def test_a_process_that_ends_slowly_takes_no_other_for_lost(process, watches):
    _, out, err = run_module("tests.processes.work_leaves", ["interpreter", str(process), watches], 3, timeout_s=90)
    assert out.count("ends at") == 3
    assert "error" not in err


@pytest.mark.parametrize("watches", ["watched", "unwatched"])
def test_process_0_keeps_the_job_until_the_others_have_left_it(watches):
    _, out, _ = run_module("tests.processes.work_leaves", ["parting", "1", watches], 3, timeout_s=90)
    times = {(row[2], row[3]): float(row[-1]) for row in map(str.split, out.splitlines())}
    assert times["0", "ends"] >= times["1", "parts"]


def test_a_process_of_a_job_can_be_terminated():
    code, _, err = run_module("tests.processes.work_fails", ["terminated"], 1, timeout_s=90, succeeds=False)
    assert (code, err.splitlines()[-1]) == (143, "Process 0 was killed by SIGTERM.")
