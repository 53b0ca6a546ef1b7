"""Pipelines whose stages lie on several processes have one device's numbers, and end."""

import re

import pytest

from tests.processes.jobs import run_module

LIMIT_S = 240
LINE = re.compile(r"process (\d) of (\d), (\d) stages: (\S+) apart, (\d+) leaves, (\d+) of (\d+) sent, (\S+)")
NUM_LEAVES = 9 + 2 * 9 + 1
"""Parameters, two moments of each, and a count."""


@pytest.fixture(
    scope="module", params=[(2, 2, 10, 0, (2, 4)), (4, 1, 4, 200, (4,)), (4, 1, 3, 10, (2,))], ids=["2", "4", "a stage over 2 of 4"]
)
def job(request):
    """Its processes, its numbers of stages, and a row of each process for each of these."""
    processes, devices, steps, unblocked, stages = request.param
    arguments = [str(steps), str(unblocked), *map(str, stages)]
    _, out, _ = run_module("tests.processes.work_pipeline", arguments, processes, devices, timeout_s=LIMIT_S)
    rows = [tuple(map(float, found.groups())) for found in LINE.finditer(out)]
    assert len(rows) == processes * len(stages)
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
