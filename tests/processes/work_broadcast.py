"""Every process starts from values of its own; one line per device, of what it holds after a first step."""

import sys

import jax
import numpy as np

import spmdctx
from spmdctx import communication

MODE, BROADCAST = sys.argv[1], sys.argv[2] == "True"

communication.init("gloo")
rank = jax.process_index()
rng = np.random.default_rng(rank)
bits = np.arange(16, dtype=np.uint32) + np.uint32(0x7FC00000 + 256 * rank)
bits[0] = 0x80000000
params = {
    "host": rng.normal(size=(8, 8)).astype(np.float32),
    "array": jax.numpy.asarray(rng.normal(size=(8, 8)), jax.numpy.bfloat16),
    "bits": bits.view(np.float32),
    "count": np.int32(rank),
    "own": np.full((8, 4), float(rank), np.float32),
}


def step(params, x):
    return jax.tree.map(lambda leaf: leaf, params), x.sum()


run = spmdctx.parallel(step, parallel_mode=MODE, parameter_broadcast=BROADCAST, layerwise_parallel=["params/own"])
x = np.ones((8, 4), np.float32)
after, _ = run(params, x)
for name, leaf in sorted(after.items()):
    for shard in leaf.addressable_shards:
        print(f"{shard.device.id} {name} {np.asarray(shard.data).tobytes().hex()}", flush=True)
