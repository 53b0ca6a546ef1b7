"""A training that is stopped and goes on: run by `spmdctx launch`; each step's loss goes to a file, bit for bit.

Arguments: the folder, or several for one training each, the number of steps, and "where:step:process" for a process to kill itself
there, as kill -9 does; "sigterm" sends it SIGTERM before the step.
"""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmdctx
from spmdctx import communication
from spmdctx.checkpoint import handler

EVERY, WIDTH = 2, 64

communication.init("gloo")
folders, num_steps = [Path(name) for name in sys.argv[1].split(os.pathsep)], int(sys.argv[2])
folder = folders[0]
where, kill_step, kill_process = sys.argv[3].split(":") if len(sys.argv) > 3 else ("", "-1", "-1")
process, now = jax.process_index(), 0
print(f"process {process} is {os.getpid()}", flush=True)


def killed(here):
    """Whether this process's time has come."""
    if here == where and now == int(kill_step) and process == int(kill_process):
        (folder / f"killed.{now}").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGTERM if here == "sigterm" else signal.SIGKILL)


def before(fn, here):
    return lambda *args, **kwargs: (killed(here), fn(*args, **kwargs))[1]


def after(fn, here):
    return lambda *args, **kwargs: (fn(*args, **kwargs), killed(here))[0]


# While the files are written, and when all are but the checkpoint has not got its name.
handler._Sealed.result = before(handler._Sealed.result, "save")
handler.StateHandler.finalize = after(handler.StateHandler.finalize, "commit")


def create():
    model = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.Dropout(0.1), nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(1)))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@spmdctx.parallel(parallel_mode="auto_parallel", dataset_strategy="data_parallel", topology="cpu")
def train_step(model, optimizer, rngs, x):
    def loss(model, rngs):
        return jnp.mean((model(x, rngs=rngs) - x[:, :8]) ** 2)

    value, gradient = nnx.value_and_grad(loss)(model, rngs)
    optimizer.update(model, gradient)
    return value


class Stream:
    """Batches by their number."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        x = np.random.default_rng(self.position).normal(size=(16, WIDTH)).astype(np.float32)
        return x[16 // jax.process_count() * process :][: 16 // jax.process_count()]

    def get_state(self):
        return self.position

    def set_state(self, state):
        self.position = state


for folder in folders:
    rngs, stream = nnx.Rngs(dropout=7), Stream()
    model, optimizer = train_step.init(create, batch=(rngs, jax.ShapeDtypeStruct((16, WIDTH), np.float32)))
    state = {"model": model, "optimizer": optimizer, "rngs": rngs}
    with spmdctx.CheckpointManager(folder / "checkpoints", every=EVERY) as checkpoints:
        start = checkpoints.restore(state, data=stream).step
        for now in range(start + 1, num_steps + 1):
            killed("compute")
            killed("sigterm")
            value = float(train_step(model, optimizer, rngs, train_step.shard_batch(next(stream))))
            if process == 0:
                with (folder / "losses.txt").open("a") as lines:
                    lines.write(f"{now} {value.hex()}\n")
                print(f"step {now}", flush=True)
            checkpoints.save(now, state, data=stream)
            if now % EVERY == 0 and where in ("save", "commit"):
                checkpoints.wait()
