"""Pipelines of a scan over layers in two processes: one device's numbers, a share of the layers on each, and checkpoints of them."""

import re

import jax
import numpy as np
import pytest

import spmdctx
from tests.processes import work_pipeline, work_stacked
from tests.processes.jobs import run_module

LIMIT_S = 150
LINE = re.compile(r"process (\d), (\d) stages of (\d): (\S+) apart, (\d+) layers on a device, (\d+) sent, (\S+)")
PIPELINES = ((2, 1), (4, 1), (2, 2))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of its checkpoints, and what each process wrote of each pipeline."""
    folder = tmp_path_factory.mktemp("stacked")
    arguments = [str(folder), *(f"{stages}:{chunks}" for stages, chunks in PIPELINES)]
    _, out, _ = run_module("tests.processes.work_stacked", arguments, 2, 2, timeout_s=LIMIT_S)
    return folder, [found.groups() for found in LINE.finditer(out)]


def test_each_process_has_one_device_s_numbers_and_its_share_of_the_layers(job):
    _, rows = job
    assert sorted((int(row[1]), int(row[2])) for row in rows) == sorted(2 * PIPELINES)
    for _, stages, chunks, apart, layers, sent, _ in rows:
        assert float(apart) <= 1e-9
        assert int(layers) == work_stacked.LAYERS // int(stages)
        # A tied weight has one copy and one gradient; of two chunks on a stage, each parameter and gradient crosses both ways.
        assert int(sent) <= (1 if chunks == "1" else 1 + 2 * 2)
        assert chunks == "1" or int(sent) >= 2 * 2


def test_a_checkpoint_is_restored_with_other_stages_or_none_and_goes_on(job):
    with jax.enable_x64(True):
        batch, states, values = work_pipeline.batches(work_stacked.STEPS + 1)[-1], [], []
        for stages in (4, 1):
            step = work_stacked.parallel(stages)
            empty = step.init(work_stacked.create, jax.random.key(1), batch=batch)
            with spmdctx.CheckpointManager(job[0] / "2_1") as checkpoints:
                state = checkpoints.restore({"state": empty}).state["state"]
            assert all(new.sharding == old.sharding for new, old in zip(jax.tree.leaves(state), jax.tree.leaves(empty), strict=True))
            states.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)])
            values.append(float(step(*state, batch)[-1]))
    assert states[0] == states[1]
    assert values[0] == pytest.approx(values[1], abs=1e-12)
