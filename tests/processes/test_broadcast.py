"""parameter_broadcast over several processes, each with values of its own: those of the first, bit for bit."""

import numpy as np
import pytest

from tests.processes.jobs import run_module

LIMIT_S = 120


def held(mode, broadcast):
    """What the devices hold, by name: the bytes, in hexadecimal."""
    _, out, _ = run_module("tests.processes.work_broadcast", [mode, str(broadcast)], 2, 2, timeout_s=LIMIT_S)
    rows = [line[line.rindex("] ") + 2 :].split() if "] " in line else line.split() for line in out.splitlines()]
    found = {}
    for device, name, text in (row for row in rows if len(row) == 3):
        found.setdefault(name, {})[int(device)] = text
    return {name: [own[device] for device in sorted(own)] for name, own in found.items()}


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_every_process_has_the_values_of_the_first(mode):
    found = held(mode, True)
    first = np.random.default_rng(0)
    assert set(found["host"]) == {first.normal(size=(8, 8)).astype(np.float32).tobytes().hex()}
    assert {name: len(own) for name, own in found.items()} == dict.fromkeys(("array", "bits", "count", "host", "own"), 4)
    assert all(len(set(found[name])) == 1 for name in ("array", "bits", "count"))
    assert found["count"][3] == np.int32(0).tobytes().hex()
    assert found["bits"][3].startswith(np.array([0x80000000, 0x7FC00001], np.uint32).tobytes().hex())
    assert len(set(found["own"])) == 2


def test_nothing_is_sent_that_was_not_asked_for():
    found = held("data_parallel", False)
    assert found["host"][0] != found["host"][3]
