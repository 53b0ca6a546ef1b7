"""A pipeline with a stage on each process, started as mpirun and srun start processes: by environment variables alone."""

import os
import re

import pytest

from tests.processes.jobs import run_as_started
from tests.processes.test_pipeline import LINE, NUM_RESULTS

LIMIT_S = 120


def open_mpi(rank):
    """Of Open MPI 5 on one machine; the namespace of the job gives the port."""
    return {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "PMIX_NAMESPACE": f"prterun-host-{os.getpid()}@1",
    }


def slurm(rank):
    """Of a step of two tasks on one machine."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


@pytest.mark.parametrize("variables", [open_mpi, slurm])
def test_a_stage_on_each_process(variables):
    written = run_as_started("tests.processes.work_pipeline", ["2", "0", "2"], [variables(0), variables(1)], timeout_s=LIMIT_S)
    rows = [LINE.search(own) for own in written]
    assert [(int(row[1]), int(row[2]), int(row[3])) for row in rows] == [(0, 2, 2), (1, 2, 2)]
    assert max(float(row[4]) for row in rows) <= 1e-9
    assert sum(int(row[6]) for row in rows) == int(rows[0][7]) > 0
    assert rows[0][8] == rows[1][8]
    for own in written:
        assert re.search(rf"verified {NUM_RESULTS} results: True", own)
