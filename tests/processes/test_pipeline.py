"""Pipelines whose stages lie on several processes have one device's numbers, and end."""

import re
import time

import jax
import numpy as np
import pytest

import spmdctx
from tests.processes import work_pipeline as work
from tests.processes.jobs import run_module

LIMIT_S = 240
LINE = re.compile(r"process (\d) of (\d), (\d) stages: (\S+) apart, (\d+) leaves, (\d+) of (\d+) sent, (\S+)")
NUM_LEAVES = 9 + 2 * 9 + 1
"""Parameters, two moments of each, and a count."""
NUM_RESULTS = NUM_LEAVES + 2
"""These, the loss and the norm of its gradient."""


@pytest.fixture(
    scope="module", params=[(2, 2, 10, 0, (2, 4)), (4, 1, 4, 200, (4,)), (4, 1, 3, 200, (2,))], ids=["2", "4", "a stage over 2 of 4"]
)
def job(request):
    """Its processes, its numbers of stages, and a row of each process for each of these."""
    processes, devices, steps, unblocked, stages = request.param
    arguments = [str(steps), str(unblocked), *map(str, stages)]
    _, out, _ = run_module("tests.processes.work_pipeline", arguments, processes, devices, timeout_s=LIMIT_S)
    rows = [tuple(map(float, found.groups())) for found in LINE.finditer(out)]
    assert len(rows) == processes * len(stages)
    assert out.count(f"verified {NUM_RESULTS} results: True") == (0 if unblocked else processes)
    return processes, stages, rows


def test_steps_have_one_device_s_numbers_and_every_process_reads_the_loss(job):
    _, _, rows = job
    assert max(row[3] for row in rows) <= 1e-9
    assert len({row[7] for row in rows}) == 1


def test_each_process_holds_the_leaves_of_its_stages_and_scalars(job):
    processes, stages, rows = job
    for count in stages:
        held = [row[4] for row in rows if row[2] == count]
        copies = max(1, processes // count)
        assert sum(held) == copies * (NUM_LEAVES - 1) + processes


def test_what_processes_send_adds_up_to_what_crosses(job):
    processes, stages, rows = job
    for count in stages:
        copies = max(1, processes // count)
        assert sum(row[5] for row in rows if row[2] == count) == copies * max(row[6] for row in rows if row[2] == count) > 0


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """The folders of an undisturbed training and of one whose process 1 was killed, which went on then; and what the kill led to."""
    calm, disturbed = tmp_path_factory.mktemp("calm"), tmp_path_factory.mktemp("disturbed")

    def train(folder, *more, succeeds=True):
        arguments = [str(folder), "5", "2", *more]
        return run_module("tests.processes.work_pipeline_train", arguments, 2, timeout_s=LIMIT_S, succeeds=succeeds)

    code, _, err = train(disturbed, "4:1", succeeds=False)
    seconds = time.time() - float((disturbed / "killed.4").read_text())
    train(disturbed)
    train(calm)
    return calm, disturbed, (code, err, seconds)


def test_a_killed_process_ends_the_others_with_one_error(trainings):
    code, err, seconds = trainings[2]
    assert code == 128 + 9
    assert err.count("error: Process") == 1
    assert "[0] error: Process 1 is gone; process 0 cannot go on without it and ends." in err
    assert seconds < 15


def test_a_training_that_was_killed_goes_on_bit_for_bit(trainings):
    calm, disturbed, _ = trainings
    expected = (calm / "losses.txt").read_text().splitlines()
    got = (disturbed / "losses.txt").read_text().splitlines()
    assert len(expected) == 5
    assert set(got) == set(expected)
    assert [line.split()[1] for line in got[-3:]] == ["3", "4", "5"]


def test_what_two_processes_saved_is_restored_in_one_with_other_stages_or_none(trainings):
    with jax.enable_x64(True):
        found = []
        for options in ({"pipeline_stages": 4}, {"grad_accumulation_step": work.MICRO}):
            step = spmdctx.parallel(work.train_step, parallel_mode="auto_parallel", topology="cpu", **options)
            params, state = step.init(work.create, jax.random.key(1), batch=work.batches(1)[0])
            with spmdctx.CheckpointManager(trainings[0] / "checkpoints", every=2) as checkpoints:
                own = checkpoints.restore({"params": params, "state": state}, step=4).state
            assert all(
                new.sharding == old.sharding for new, old in zip(jax.tree.leaves(own["params"]), jax.tree.leaves(params), strict=True)
            )
            found.append(own)
        *_, value, _ = step(own["params"], own["state"], work.batches(6)[5])
        assert float(value) == pytest.approx(float.fromhex((trainings[0] / "losses.txt").read_text().split()[-1]), abs=1e-12)
        for one, other in zip(*map(jax.tree.leaves, found), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
