"""A training script that knows nothing of how its processes are started."""

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx
from spmdctx import communication, ops

communication.init("gloo")


@spmdctx.parallel(parallel_mode="hybrid_parallel", gradients_mean=True)
def step(w, x):
    def loss(w, x):
        centre = ops.AllReduce()(x.mean(axis=0)) / communication.get_group_size()
        return jnp.mean(((x - centre) @ w) ** 2)

    value, gradient = spmdctx.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value


rng = np.random.default_rng(0)
w, x = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(24, 8)).astype(np.float32)
for _ in range(3):
    w, value = step(w, x)
    jax.block_until_ready(w)
print(f"rank {communication.get_rank()} of {communication.get_group_size()}, loss {float(value):.5f}", flush=True)
