"""`spmdctx train` as a job: on the devices that the launcher gives, equal to one device, its output written once."""

import json
import math

from tests.processes.jobs import run_module


def test_training_on_two_processes_is_that_of_one_device(tmp_path):
    sizes = ["--layers", "1", "--seq", "12", "--batch-size", "8", "--steps", "1", "--json"]
    _, out, err = run_module("spmdctx", ["train", *sizes, "--out", str(tmp_path)], 2, 2, timeout_s=200)
    assert [line for line in out.splitlines() if not line.startswith("[0] ")] == []
    found = json.loads("\n".join(line.removeprefix("[0] ") for line in out.splitlines()))
    assert "Gloo" not in out + err
    assert math.prod(found["plan"]["mesh"].values()) == found["verify"]["num_devices"] == 4
    assert found["audit"]["ok"]
    assert found["verify"]["ok"]
    assert {"model.json", "plan.html", "plan.json", "state", "tokenizer.json"} <= {path.name for path in tmp_path.iterdir()}
