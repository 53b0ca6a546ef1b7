"""Batches on several processes: each reads only its part, and all of them pad, drop, stop or fail together."""

import json

import pytest

from tests.processes.jobs import run_module


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes of four devices found."""
    folder = tmp_path_factory.mktemp("found")
    run_module("tests.data.work_halves", [str(folder)], 2, 4, timeout_s=180)
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(2)]


def test_each_process_reads_exactly_its_half_of_the_pixels(found):
    assert [own["halves"] for own in found] == [{"pixels": [2048] * 3, "equal": True, "results": True}] * 2


def test_shuffled_rows_are_read_by_halves_too(found):
    half = 20 * 16 * 32 // 2
    assert [own["shuffled"] for own in found] == [{"pixels": half, "equal": True, "seen": True, "padded": 4}] * 2


def test_each_process_gives_its_own_rows(found):
    assert [own["own"] for own in found] == [{"equal": [True] * 3, "rows": 8, "shard_batch": True}] * 2


def test_each_process_gives_whole_batches_with_full_batch(found):
    assert [own["whole"] for own in found] == [{"equal": [True] * 2, "shard_batch": True}] * 2


def test_short_batches_are_an_error_in_all_processes(found):
    for own in found:
        assert own["error"]["rows"] == [8]
        assert "A batch has 6 rows, and the plan 8" in own["error"]["error"]
        assert "rows per process: 4 of 4, 2 of 4" in own["error"]["error"]


def test_short_batches_are_padded_in_all_processes(found):
    labels = [[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 6, 6], [2, 3, 4, 4, 6, 6, 6, 6]]
    assert [own["pad"] for own in found] == [{"rows": [8, 6, 3], "labels": labels, "dropped": 0, "padded": 7}] * 2


def test_short_batches_are_dropped_in_all_processes(found):
    assert [own["drop"] for own in found] == [{"rows": [8], "labels": [[0, 1, 2, 3, 4, 5, 6, 7]], "dropped": 9, "padded": 0}] * 2


def test_what_one_process_cannot_read_ends_all(found):
    assert "StrategyError: Process 1 failed to read its part of a batch." in found[0]["failing"]
    assert found[1]["failing"] == "FileNotFoundError: part-00001 is not there"


def test_processes_that_hold_the_same_rows_must_be_given_the_same(found):
    for process, own in enumerate(found):
        assert own["same_rows"]["shards"] == [[0, 1, 8], [process, 2, 4], [0, 1, 8], [0, 1, 8]]
        columns = [[start, start + 8] for start in range(0, 32, 8)]
        assert own["same_rows"]["ranges"] == [[[[0, 8]], [[process * 8, process * 8 + 8]], columns], [[[0, 8]]]]
        assert "Processes 0 and 1 hold the same part of the batch, but were given different data" in own["same_rows"]["error"]
        assert own["same_rows"]["equal"]


def test_whole_batches_must_be_alike_and_end_together(found):
    for own in found:
        assert "hold the same part of the batch, but were given different data" in own["unlike"][0]
        assert "leaf 1 of the batch" in own["unlike"][0]
        assert "Process 0 has no more batches, while others have" in own["unlike"][1]


def test_a_process_may_read_alone_for_its_own_devices(found):
    assert [own["alone"] for own in found] == [2, 3]
