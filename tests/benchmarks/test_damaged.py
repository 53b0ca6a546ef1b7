"""A sample of damaged input of every kind: documented errors only, in little time and memory, and no wrong values."""

from __future__ import annotations

import random

import pytest

from benchmarks import kills
from benchmarks.damaged import KINDS, judged, run
from benchmarks.damaged_values import damaged_bytes, damaged_data
from spmdctx.errors import ContextError


def test_a_sample_of_damaged_input_has_no_fault():
    said = []
    counts, faults = run(7, range(216), None, said.append)
    assert faults == [], "\n".join(said)
    assert sum(counts.values()) == 216
    assert {name.split()[0] for name in counts} == set(KINDS)
    assert sum(count for name, count in counts.items() if name.endswith("refused")) > 108


def raising(error):
    def read():
        raise error

    return read


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (lambda: "", "right"),
        (lambda: "other values", "wrong"),
        (raising(ContextError("It is wrong.")), "refused"),
        (raising(ContextError("x" * 10**5)), "long"),
        (raising(FileNotFoundError("none")), "refused"),
        (raising(KeyError("raw")), "raw"),
        (raising(TypeError("not laid out")), "raw"),
        (raising(SystemExit(1)), "raw"),
        (lambda: f"{len(bytearray(600 << 20)) == 0 or ''}", "memory"),
    ],
)
def test_every_outcome_is_judged(read, outcome):
    assert judged(read)[0] == outcome


def test_a_hang_is_judged(monkeypatch):
    monkeypatch.setattr("benchmarks.damaged.LIMIT_S", 0.05)

    def endless():
        while True:
            pass

    assert judged(endless)[0] == "hang"


def test_damage_is_the_same_for_one_seed_and_leaves_the_original():
    data = {"a": [1, {"b": "c"}], "d": [[2, 3], [4]]}
    found = [damaged_data(random.Random(seed), data)[1] for seed in range(40)]
    assert found == [damaged_data(random.Random(seed), data)[1] for seed in range(40)]
    assert data == {"a": [1, {"b": "c"}], "d": [[2, 3], [4]]}
    assert sum(one != data for one in found) > 30
    assert sum(damaged_bytes(random.Random(seed), b"0123456789" * 9)[1] != b"0123456789" * 9 for seed in range(100)) > 80


def test_what_a_killed_process_found_is_judged(tmp_path, monkeypatch):
    class Run:
        rows, errors = (["found", "3"], ["begin", "4"]), ""

        def __init__(self, *_):
            self.process = self

        def poll(self):
            return None

        def wait_for(self, *_):
            pass

        end = wait_for

        def last(self, word, other):
            return {"found": 3, "begin": 4}.get(word, other)

    monkeypatch.setattr(kills, "Run", Run)

    def tell(done):
        return kills.kill_once("ranks", tmp_path, "normal", done, random.Random(0), kills.Counter())

    assert tell({"ranks": 3}) == []
    assert tell({"ranks": 2, "ranks begun": 3}) == []
    assert "after 4 was saved" in tell({"ranks": 4})[0]
    assert "after 2 was saved and 2 begun" in tell({"ranks": 2})[0]
