"""A job whose workers do not wait for each other: every part is an update, none too late, and a job submitted again goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is an extra")
ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax, spmdctx

tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

@spmdctx.parallel(parallel_mode="stand_alone")
def step(state, x):
    params, own = state
    value, grads = spmdctx.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"]) ** 2))(params)
    updates, own = tx.update(grads, own, params)
    return (optax.apply_updates(params, updates), own), value

params = {"w1": jnp.ones((4, 8)) / 4, "w2": jnp.ones((8, 2))}
state = params, tx.init(params)
for number in range(int(sys.argv[1])):
    state, value = step(state, jnp.asarray(np.random.default_rng(number).normal(size=(6, 4)), "float32"))
print("count", int(jax.tree.leaves(state[1])[0]), "loss", float(value))
"""


def launched(script, folder, steps):
    command = [sys.executable, "-m", "spmdctx", "launch", "--json", "--servers", "2", "--workers", "2", "--mode", "async"]
    command += ["--max-staleness", "1", "--save-every", "4", "--timeout", "120", "--folder", str(folder), str(script), str(steps)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_each_part_is_an_update_and_a_second_submission_goes_on(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "states"
    script.write_text(SCRIPT)
    said, _ = launched(script, folder, 9)
    assert said["updates"] == sum(said["staleness"].values()) == 18
    assert max(map(int, said["staleness"])) <= 1
    saved = max(int(place.name.removeprefix("state-")) for place in folder.glob("state-*"))
    assert 6 <= saved <= 18  # the last save may not have come to its end
    said, lines = launched(script, folder, 12)
    assert 24 >= said["updates"] >= sum(said["staleness"].values()) + saved
    assert "count 2" in lines
