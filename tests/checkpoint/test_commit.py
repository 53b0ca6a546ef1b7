"""Files per rank appear together: whenever a save ends early, one whole checkpoint is there, the former one or the new one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx import CheckpointError


class Killed(BaseException):
    """Stands for the end of the process."""


ROWS, COLUMNS = P("x"), P(None, "x")


def state(step, num_ranks=4, spec=ROWS):
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), ("x",))
    value = np.random.default_rng(step).normal(size=(8, 8)).astype(np.float32)
    return {"w": jax.device_put(value, NamedSharding(mesh, spec)), "n": np.int32(step)}


def loaded(folder, like=None):
    """Returns the step of what is there; all of it is that step's."""
    found = spmdctx.load_distributed_checkpoint(like or state(0), folder, verify=True).network
    np.testing.assert_array_equal(found["w"], state(int(found["n"]))["w"])
    return int(found["n"])


def hidden(folder):
    return [path.name for path in folder.rglob(".*")]


def dying(monkeypatch, number, raised):
    """Has the rename of that number, counted from 0, end in an error."""
    real, count = os.replace, iter(range(1000))

    def replace(*names, **options):
        if next(count) == number:
            raise raised
        real(*names, **options)

    monkeypatch.setattr(os, "replace", replace)


NUM_RENAMES = 4 + 1 + 1 + 4 + 1
"""The ranks' files, their strategy, the list, and ranks and strategy once more, to their names."""


@pytest.mark.parametrize("number", range(NUM_RENAMES))
def test_a_save_killed_at_any_rename_leaves_one_whole_checkpoint(tmp_path, monkeypatch, number):
    spmdctx.save_distributed_checkpoint(state(1), tmp_path)
    with monkeypatch.context() as patch:
        dying(patch, number, Killed())
        # The process ends, so nothing that it would do in the end is done.
        patch.setattr("spmdctx.checkpoint.commit._remove", lambda paths: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(Killed):
            spmdctx.save_distributed_checkpoint(state(2, spec=COLUMNS), tmp_path)
    assert loaded(tmp_path) == (1 if number < 6 else 2)
    spmdctx.save_distributed_checkpoint(state(3), tmp_path)
    assert loaded(tmp_path) == 3
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_save_that_fails_leaves_the_former_one_and_nothing_else(tmp_path, monkeypatch, number):
    spmdctx.save_distributed_checkpoint(state(1), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        dying(patch, number, OSError(errno.EROFS, os.strerror(errno.EROFS)))
        with pytest.raises(CheckpointError, match="Read-only file system"):
            spmdctx.save_distributed_checkpoint(state(2), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("number", range(NUM_RENAMES))
def test_a_transform_killed_at_any_rename_leaves_one_whole_checkpoint(tmp_path, monkeypatch, number):
    target = tmp_path / "target"
    for step in (1, 2):
        spmdctx.save_distributed_checkpoint(state(step), tmp_path / str(step))
    split = spmdctx.save_distributed_checkpoint(state(1, spec=COLUMNS), tmp_path / "columns")
    spmdctx.transform_checkpoints(tmp_path / "1", target, "a", None, split)
    with monkeypatch.context() as patch:
        dying(patch, number, Killed())
        patch.setattr("spmdctx.checkpoint.commit._remove", lambda paths: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(Killed):
            spmdctx.transform_checkpoints(tmp_path / "2", target, "a", None, split)
    assert loaded(target) == (1 if number < 6 else 2)
    spmdctx.transform_checkpoints(tmp_path / "2", target, "a", None, split)
    assert loaded(target) == 2
    assert hidden(target) == []


def test_a_folder_that_was_made_for_a_failed_save_is_gone(tmp_path, monkeypatch):
    dying(monkeypatch, 2, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(CheckpointError, match="No space left"):
        spmdctx.save_distributed_checkpoint(state(1), tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "body", ['{"names": ["../x"]}', '{"names": ["/etc/passwd"]}', '{"names": 3}', "[]", "{", '{"names": ["a\\u0000b"]}', '{"names": [""]}']
)
def test_a_damaged_list_is_refused(tmp_path, body):
    spmdctx.save_distributed_checkpoint(state(1), tmp_path)
    (tmp_path / ".commit.json").write_text(body)
    for act in (lambda: loaded(tmp_path), lambda: spmdctx.save_distributed_checkpoint(state(2), tmp_path)):
        with pytest.raises(CheckpointError, match="damaged"):
            act()


def test_a_checkpoint_of_more_ranks_is_not_mixed_with_fewer(tmp_path):
    spmdctx.save_distributed_checkpoint(state(1), tmp_path)
    with pytest.raises(CheckpointError, match="more ranks"):
        spmdctx.save_distributed_checkpoint(state(2, 2), tmp_path)
    assert loaded(tmp_path) == 1


@pytest.mark.parametrize("prefix", ["../", "a/", "a\0"])
def test_a_prefix_that_is_a_path_is_refused(tmp_path, prefix):
    with pytest.raises(CheckpointError, match="prefix"):
        spmdctx.save_distributed_checkpoint(state(1), tmp_path / "a", prefix)
    assert not list(tmp_path.iterdir())


def test_files_of_two_ranks_in_each_others_place_are_found(tmp_path):
    spmdctx.save_distributed_checkpoint(state(1), tmp_path)
    one, two = (tmp_path / f"rank_{rank}" / f"checkpoint{rank}.safetensors" for rank in (1, 2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"slices of another rank(.|\n)*rank '2'"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["rank_1/checkpoint1.safetensors", "strategy.json", "rank_1"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, name):
    spmdctx.save_distributed_checkpoint(state(1), tmp_path / "saved")
    (tmp_path / "saved" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "saved" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        loaded(tmp_path / "saved")


@pytest.mark.parametrize("name", ["rank_1/checkpoint1.safetensors", "strategy.json"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path, name):
    spmdctx.save_distributed_checkpoint(state(1), tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(spmdctx.SpmdctxError, match="it is a pipe, and no file"):
        loaded(tmp_path)


def test_a_tensor_without_elements_is_saved_and_loaded(tmp_path):
    own = {"w": np.zeros((0, 4), np.float32), "n": np.int32(1)}
    spmdctx.save_distributed_checkpoint(own, tmp_path)
    assert json.loads((tmp_path / "strategy.json").read_text())["parallel_layout_item"]["w"]["tensor_shape"] == [0, 4]
    assert spmdctx.load_distributed_checkpoint(own, tmp_path).network["w"].shape == (0, 4)
