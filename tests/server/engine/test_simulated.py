"""Jobs whose workers and servers are lost and scaled at random, without an engine: nobody hangs, and no update is lost or done twice.

The clock of these jobs jumps, so that hundreds of them take seconds.
"""

import pytest

from tests.server.engine import simulated as simulated_engine
from tests.server.engine.simulated import KEYS, PARTS, STEPS, simulated

ALL = [(step, part) for step in range(STEPS) for part in range(PARTS)]


@pytest.mark.parametrize("first", [0, 15])
def test_a_sync_job_comes_to_the_same_end_whatever_is_lost(first, tmp_path, monkeypatch):
    for seed in range(first, first + 15):
        _, held = simulated(seed, "sync", 0, tmp_path, monkeypatch)
        assert held == {key: tuple(ALL) for key in range(KEYS)}, seed


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_an_async_job_loses_at_most_what_was_done_since_the_last_save(bound, tmp_path, monkeypatch):
    num_lost = 0
    for seed in range(25):
        job, held = simulated(seed, "async", bound, tmp_path, monkeypatch)
        for key, own in held.items():
            assert len(own) == len(set(own)), (seed, key)
            missing = set(ALL) - set(own)
            assert missing <= job.lost[key] | job.partly[key], (seed, key)
            num_lost += len(missing)
        assert max(job.scheduler._progress.staleness, default=0) <= bound, seed
        assert len(held) == KEYS
    assert num_lost > 0


def test_an_async_job_that_loses_no_server_loses_no_update(tmp_path, monkeypatch):
    for seed in range(8):
        job, held = simulated(seed, "async", 2, tmp_path, monkeypatch, troubles=0)
        assert all(sorted(own) == ALL for own in held.values()), seed
        assert sum(job.scheduler._progress.staleness.values()) == len(ALL)


@pytest.mark.parametrize("first", [True, False])
def test_a_job_ends_where_a_server_cannot_start(first, tmp_path, monkeypatch):
    found = simulated_engine.Actor.restart
    monkeypatch.setattr(
        simulated_engine.Actor, "restart", lambda actor, seconds: found(actor, seconds if not (first or actor.was) else 1e9)
    )
    with pytest.raises(AssertionError, match=r"(?s)Server \d cannot start.*no answer in 300 s.*ray status"):
        simulated(3, "sync", 0, tmp_path, monkeypatch, troubles=0 if first else 40)
