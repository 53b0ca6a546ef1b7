"""Steps on 2 x 4 and 4 x 2 processes and devices against one process with eight devices."""

import functools
import json

import jax
import numpy as np
import pytest

from spmdctx import communication
from spmdctx.plan.file import plan_json
from tests.processes.asked import everything
from tests.processes.cells import CELLS, run
from tests.processes.jobs import run_module

TOLERANCE = 1e-6
PLACES = [(layout, cell) for layout, cells in CELLS.items() for cell in cells]
IDS = [f"{processes}x{devices}-{cell}" for (processes, devices), cell in PLACES]


@functools.cache
def alone(cell):
    with jax.enable_x64(True):
        _, plan, _, found = run(cell)
    return plan_json(plan), found


@functools.cache
def asked_alone():
    communication.init()
    try:
        return everything()
    finally:
        communication.release()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Per layout the folder that its job has written; jobs are run when they are first needed."""

    @functools.cache
    def folder(layout):
        made = tmp_path_factory.mktemp("cells")
        run_module("tests.processes.work_cells", [str(made)], *layout, timeout_s=300)
        return made

    return folder


def asked(folders, layout):
    """What each process answered."""
    return [json.loads((folders(layout) / f"asked.{process}.json").read_text()) for process in range(layout[0])]


@pytest.mark.parametrize(("layout", "cell"), PLACES, ids=IDS)
def test_a_step_on_several_processes_is_that_of_one(folders, layout, cell):
    _, expected = alone(cell)
    found = np.load(folders(layout) / f"{cell}.npz")
    assert set(found) == set(expected)
    assert max(_difference(found[path], expected[path]) for path in expected) <= TOLERANCE


@pytest.mark.parametrize(("layout", "cell"), PLACES, ids=IDS)
def test_plans_are_byte_identical_on_every_process(folders, layout, cell):
    expected, _ = alone(cell)
    assert [(folders(layout) / f"{cell}.{process}.json").read_text() for process in range(layout[0])] == [expected] * layout[0]


@pytest.mark.parametrize("layout", CELLS, ids=str)
@pytest.mark.parametrize("question", ["collectives", "state_and_batch"])
def test_collectives_and_states_are_those_of_one_process(folders, layout, question):
    expected = jax.tree.leaves(asked_alone()[question])
    for answers in asked(folders, layout):
        np.testing.assert_allclose(jax.tree.leaves(answers[question]), expected, rtol=1e-5)


@pytest.mark.parametrize("layout", CELLS, ids=str)
def test_a_rank_is_a_device(folders, layout):
    devices = layout[1]
    for process, answers in enumerate(asked(folders, layout)):
        first = process * devices
        half = first // 4
        assert answers["place"] == {
            "rank": first,
            "size": 8,
            "local": [first, 8],
            "even": [first // 2, 4],
            "halves": [first % 4, 4, 4],
            "to world": [4, 4 * half + 1],
            "from world": 3,
        }


@pytest.mark.parametrize("layout", CELLS, ids=str)
def test_steps_are_verified_and_audited_on_all_processes(folders, layout):
    assert [answers["checks"] for answers in asked(folders, layout)] == [{"verified": [True, 8], "audited": True}] * layout[0]


@pytest.mark.parametrize(
    ("question", "difference"),
    [("other_plan", "the note 'Another note.'"), ("other_constant", "numbers or arrays that are written into the program")],
)
@pytest.mark.parametrize("layout", CELLS, ids=str)
def test_a_process_with_another_program_is_told_the_first_difference(folders, layout, question, difference):
    first, *others = [answers[question] for answers in asked(folders, layout)]
    assert first == ""
    for process, text in enumerate(others, 1):
        assert f"train_step is another program on process {process} than on process 0" in text
        assert f"the first difference is {difference}" in text


def _difference(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if not np.issubdtype(expected.dtype, np.floating):
        return 0.0 if np.array_equal(found, expected) else np.inf
    return float(np.abs(found - expected).max(initial=0.0) / max(np.abs(expected).max(initial=0.0), 1e-3))
