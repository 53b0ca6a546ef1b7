"""Saved states count when they are whole, and only then."""

import contextlib
import shutil

import numpy as np
import pytest

from spmdctx.checkpoint import tensor_file
from spmdctx.errors import CheckpointError, FileError
from spmdctx.server.state import folder as saved
from spmdctx.server.state.folder import (
    SavedState,
    complete,
    load_arrays,
    load_results,
    newest_state,
    save_shard,
    saved_states,
    state_folder,
)

RESULTS = {step: {1: np.float64(step), 2: np.full(3, step, np.float32)} for step in range(4)}


def save(folder, version, num_servers=2, results=RESULTS):
    files = [save_shard(folder, version, number, {f"a{number}": np.full(4, version + number)}) for number in range(num_servers)]
    complete(folder, SavedState(version, state_folder(folder, version), "step", 3, tuple(files)), results)


def test_arrays_come_back_whichever_server_saved_them(tmp_path):
    save(tmp_path, 4)
    found = load_arrays(tmp_path, 4, ["a1", "a0"])
    assert found["a1"].tolist() == [5] * 4
    assert found["a0"].tolist() == [4] * 4
    assert newest_state(tmp_path).num_parts == 3


def test_results_come_back_by_step_whatever_their_types(tmp_path):
    mixed = {**RESULTS, 4: {1: np.float32(0.5)}, 9: {2: np.ones(2, np.float32)}}
    save(tmp_path, 10, results=mixed)
    found = load_results(newest_state(tmp_path))
    assert found.keys() == mixed.keys()
    for step, own in mixed.items():
        assert found[step].keys() == own.keys()
        for number, value in own.items():
            assert found[step][number].dtype == np.asarray(value).dtype
            np.testing.assert_array_equal(found[step][number], value)


def test_a_file_of_another_layout_is_not_read(tmp_path):
    save_shard(tmp_path, 4, 7, {"a0": np.zeros(1)})
    save(tmp_path, 4)
    assert load_arrays(tmp_path, 4, ["a0"])["a0"].tolist() == [4] * 4


def test_the_last_two_states_stay_and_what_never_counted_goes(tmp_path):
    save_shard(tmp_path, 2, 0, {"a": np.zeros(1)})
    for version in (4, 8, 12):
        save(tmp_path, version)
    save_shard(tmp_path, 16, 0, {"a": np.zeros(1)})
    assert [state.version for state in saved_states(tmp_path)] == [8, 12]
    assert sorted(path.name[-2:] for path in tmp_path.iterdir()) == ["08", "12", "16"]


@pytest.mark.parametrize("at", range(12))
def test_a_kill_at_any_call_leaves_the_newest_state_whole(tmp_path, monkeypatch, at):
    class Killed(BaseException):
        pass

    save(tmp_path, 4)
    save(tmp_path, 8)
    calls = 0

    def dying(function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls > at:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for where, name in ((saved, "write_json"), (saved, "write_tensors"), (saved.shutil, "rmtree"), (tensor_file.zlib, "crc32")):
            patch.setattr(where, name, dying(getattr(where, name)))
        with contextlib.suppress(Killed):
            save(tmp_path, 12)
    found = newest_state(tmp_path)
    assert found.version == (12 if calls <= at or ((found.folder / "state.json").is_file() and found.version == 12) else 8)
    assert load_arrays(tmp_path, found.version, ["a0"])["a0"].tolist() == [found.version] * 4
    assert load_results(found).keys() == RESULTS.keys()
    assert all((state.folder / "server-0.safetensors").is_file() for state in saved_states(tmp_path))


def test_a_removal_that_is_cut_short_leaves_no_state_that_counts(tmp_path, monkeypatch):
    for version in (4, 8):
        save(tmp_path, version)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: (path / "server-0.safetensors").unlink())
    save(tmp_path, 12)
    assert [state.version for state in saved_states(tmp_path)] == [8, 12]


def test_a_full_disk_leaves_the_former_state(tmp_path, monkeypatch):
    save(tmp_path, 4)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file.zlib, "crc32", full)
    with pytest.raises((CheckpointError, FileError), match="No space left"):
        save(tmp_path, 8)
    monkeypatch.undo()
    assert newest_state(tmp_path).version == 4
    assert not state_folder(tmp_path, 8).exists()


@pytest.mark.parametrize(
    "harm",
    [
        lambda place: (place / "state.json").write_text("{"),
        lambda place: (place / "state.json").write_text('{"version": 4}'),
        lambda place: (place / "server-1.safetensors").unlink(),
        lambda place: (place / "server-1.safetensors").write_bytes((place / "server-1.safetensors").read_bytes()[:-3]),
        lambda place: (place / "results.safetensors").unlink(),
        lambda place: place.rename(place.with_name("state-000000007")),
    ],
)
def test_damage_is_one_error_that_names_the_file(tmp_path, harm):
    save(tmp_path, 4)
    harm(state_folder(tmp_path, 4))
    with pytest.raises(CheckpointError, match="state-00000000"):
        newest_state(tmp_path)


def test_changed_bytes_are_seen_when_they_are_loaded(tmp_path):
    save(tmp_path, 4)
    file = state_folder(tmp_path, 4) / "server-1.safetensors"
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)
    with pytest.raises(CheckpointError, match="checksum"):
        load_arrays(tmp_path, 4, ["a1"])
