"""A process that starts servers for itself: it may have several steps one after the other, and leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdctx.server import scale

pytest.importorskip("ray", reason="Ray is an extra")
ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, time
import jax.numpy as jnp, numpy as np, spmdctx
from spmdctx.errors import UnsupportedError

def made():
    @spmdctx.parallel(parallel_mode="stand_alone")
    def step(params, x):
        value, grads = spmdctx.value_and_grad(lambda w: jnp.mean(x @ w))(params)
        return params - grads, value
    return step

def trained(step, params, count, size=4):
    for _ in range(count):
        params, value = step(params, jnp.ones((size, 3)))
    return params

folder = sys.argv[1]
spmdctx.set_ps_context(enable_ps=True)
step = made()
first = trained(step, jnp.zeros(3), 2)
other = trained(step, first, 1, size=8)
print("other shapes", float(first[0]), float(other[0]))
spmdctx.set_ps_context(enable_ps=True, folder=folder, save_every=1)
step = made()
state = trained(step, jnp.zeros(3), 3)
print("in a folder", float(state[0]))
again = made()
try:
    trained(again, jnp.zeros(3), 1)
except UnsupportedError as error:
    print("refused", str(error).splitlines()[0])
while not list(__import__("pathlib").Path(folder).glob("state-000000003/state.json")):
    time.sleep(0.05)
del step, state, again
print("run again", float(trained(made(), jnp.zeros(3), 5)[0]))
"""


def run(script, folder, tmp_path):
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}
    env |= {"TMPDIR": str(tmp_path / "tmp"), "RAY_TMPDIR": "/tmp"}  # Ray needs a short path
    command = [sys.executable, str(tmp_path / "train.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env)


def test_steps_of_one_process_have_servers_of_their_own(tmp_path):
    done = run(SCRIPT, tmp_path / "run", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "other shapes -2.0 -3.0",
        "in a folder -3.0",
        "refused This process has a job in this folder already, whose servers hold the state of another step, or of other shapes.",
        "run again -5.0",
    ]
    assert not list((tmp_path / "tmp").glob("spmdctx-ps-*"))


def test_a_folder_of_another_process_is_refused_by_name(tmp_path):
    folder = tmp_path / "run"
    scale.take(folder)
    try:
        code = SCRIPT.replace("enable_ps=True)", "enable_ps=True, folder=sys.argv[1])", 1)
        done = run(code, folder, tmp_path)
    finally:
        scale.release(folder)
    assert done.returncode == 1
    assert "CommunicationError: Another job runs in this folder." in done.stderr
    assert str(folder) in done.stderr
