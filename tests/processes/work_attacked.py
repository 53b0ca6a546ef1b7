"""A small training that strangers attack meanwhile: each loss is printed, bit for bit.

Arguments: the number of steps, the seconds that each takes at least, and "process:step" for a process to kill itself there.
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx
from spmdctx import communication

num_steps, pause = int(sys.argv[1]), float(sys.argv[2])
kill_process, kill_step = map(int, sys.argv[3].split(":")) if len(sys.argv) > 3 else (-1, -1)
communication.init("gloo", timeout_s=60)
process = jax.process_index()


@spmdctx.parallel(parallel_mode="data_parallel")
def step(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient, value


w, x = (np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32) for seed in range(2))
for now in range(num_steps):
    w, value = step(w, x)
    print(f"loss {now} {float(value).hex()}", flush=True)
    if (process, now) == (kill_process, kill_step):
        print(f"killed {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(pause)
with open(os.devnull):
    print("files can be opened", flush=True)
communication.release()
print("done", flush=True)
