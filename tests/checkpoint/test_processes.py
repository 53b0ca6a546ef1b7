"""Checkpoints between numbers of processes: what one saved several restore, and the other way round."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx import CheckpointError
from tests.processes.jobs import run_module

W = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)


def state(zero=False):
    mesh = Mesh(np.array(jax.devices()[:3]), ("a",))
    w = jax.device_put(W * 0 if zero else W, NamedSharding(mesh, P("a")))
    if zero:
        return {"w": w, "local": jnp.zeros(3, jnp.int32), "host": np.zeros(2), "number": 0, "key": jax.random.key(0)}
    return {"w": w, "local": jnp.array([4, 5, 6]), "host": np.array([0.5, 1.5]), "number": 7, "key": jax.random.key(3)}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder, and what each of two processes found."""
    folder = tmp_path_factory.mktemp("job")
    with spmdctx.CheckpointManager(folder / "one") as checkpoints:
        checkpoints.save(5, state(), data=11)
    spmdctx.save_distributed_checkpoint(state(), folder / "one ranks")
    run_module("tests.checkpoint.work_processes", [str(folder)], 2, 2, timeout_s=180)
    return folder, [json.loads((folder / f"{process}.json").read_text()) for process in range(2)]


def test_several_processes_restore_what_one_saved(job):
    for own in job[1]:
        assert own["from one process"] == [5, True, 11]
        assert own["from files of one process"] == [True, W.nbytes // 2 + 3 * 4 + 2 * 8 + 8 + 2 * 4]  # its devices' columns, and the rest


def test_each_process_writes_the_files_of_its_devices(job):
    assert [own["files"] for own in job[1]] == [[f"rank_{rank}" for rank in range(4)]] * 2


def test_a_process_that_cannot_write_is_an_error_in_all_and_the_former_files_stay(job):
    folder, results = job
    for failing in (0, 1):
        said = [result[f"failing {failing}"] for result in results]
        assert "No such file" in said[failing]
        assert "Another process could not write its files" in said[1 - failing]
    assert not list((folder / "ranks").rglob(".*"))


def test_several_processes_restore_their_own_with_their_own_data_positions(job):
    for process, own in enumerate(job[1]):
        assert own["steps"] == [[2, 3], 3]
        assert own["from several"] == [3, True, {"batch": 3, "own": process}]


def test_damage_is_an_error_in_all_processes(job):
    texts = [own["damaged"] for own in job[1]]
    assert all("The checkpoint is damaged" in text for text in texts)
    assert any("instead of" in text for text in texts)


def check(found):
    expected = state()
    assert found.pop("key") == expected.pop("key")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_one_process_restores_what_several_saved(job, tmp_path):
    check(spmdctx.load_distributed_checkpoint(state(zero=True), job[0] / "ranks").network)
    with spmdctx.CheckpointManager(job[0] / "several") as checkpoints, pytest.raises(CheckpointError, match="data positions of their own"):
        checkpoints.restore(state(zero=True))
