"""Steps on 2 x 4 and 4 x 2 processes and devices against one process with eight devices."""

import functools

import jax
import numpy as np
import pytest

from spmdctx.plan.file import plan_json
from tests.processes.cells import CELLS, run
from tests.processes.jobs import run_module

TOLERANCE = 1e-6
LAYOUTS = ((2, 4), (4, 2))


@functools.cache
def alone(cell):
    with jax.enable_x64(True):
        _, plan, _, found = run(cell)
    return plan_json(plan), found


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"{layout[0]}x{layout[1]}")
def results(request, tmp_path_factory):
    """The folder that a job of this many processes has written."""
    processes, devices = request.param
    folder = tmp_path_factory.mktemp("cells")
    run_module("tests.processes.work_cells", [str(folder)], processes, devices, timeout_s=240)
    return processes, folder


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_step_on_several_processes_is_that_of_one(results, cell):
    _, folder = results
    _, expected = alone(cell)
    found = np.load(folder / f"{cell}.npz")
    assert set(found) == set(expected)
    assert max(_difference(found[path], expected[path]) for path in expected) <= TOLERANCE


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_plans_are_byte_identical_on_every_process(results, cell):
    processes, folder = results
    expected, _ = alone(cell)
    assert [(folder / f"{cell}.{number}.json").read_text() for number in range(processes)] == [expected] * processes


def _difference(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if not np.issubdtype(expected.dtype, np.floating):
        return 0.0 if np.array_equal(found, expected) else np.inf
    return float(np.abs(found - expected).max(initial=0.0) / max(np.abs(expected).max(initial=0.0), 1e-3))
