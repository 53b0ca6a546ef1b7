"""Pipelines over the processes of a job, against one device: run by `spmdctx launch`.

Arguments: the number of steps that are compared, that of steps that nothing waits for, and numbers of stages.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdctx
from spmdctx import communication
from spmdctx.pipeline.programs.transfers import Moved

MICRO, WIDTH, LAYERS = 4, 8, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


def create(key):
    keys = jax.random.split(key, LAYERS + 1)
    layers = [{"w": jax.random.normal(own, (WIDTH, WIDTH), jnp.float64) / 3, "b": jnp.zeros(WIDTH)} for own in keys[1:]]
    params = {"embed": jax.random.normal(keys[0], (12, WIDTH), jnp.float64), "layers": layers}
    return params, OPTIMIZER.init(params)


def loss(params, batch):
    """The first and the last stage share a weight."""
    x = params["embed"][batch["words"]]
    for own in params["layers"]:
        x = x + jnp.tanh(x @ own["w"] + own["b"])
    logits = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(logits, batch["targets"][:, None], -1))


def train_step(params, state, batch):
    value, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(loss, micro_size=MICRO))(params, batch)
    update, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value, optax.tree.norm(gradient)


def plain_step(params, state, batch):
    value, gradient = jax.value_and_grad(loss)(params, batch)
    update, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value, optax.tree.norm(gradient)


def batches(count):
    rng = np.random.default_rng(0)
    return [{name: rng.integers(0, 12, 16) for name in ("words", "targets")} for _ in range(count)]


def difference(got, want):
    """The largest difference in what this process has, and how many leaves it has a part of."""
    found = [(shard, other) for one, other in zip(got, want, strict=True) for shard in one.addressable_shards]
    held = sum(bool(one.addressable_shards) for one in got)
    return max(float(np.abs(np.asarray(shard.data) - np.asarray(other)[shard.index]).max()) for shard, other in found), held


def main(num_steps, num_unblocked, stages):
    step = spmdctx.parallel(train_step, parallel_mode="auto_parallel", pipeline_stages=stages, topology="cpu")
    data = batches(max(num_steps, 1))
    key = jax.random.key(0)
    got, want = step.init(create, key, batch=data[0]), create(key)
    plain, worst = jax.jit(plain_step), 0.0
    for number, batch in enumerate(data):
        # Each process has the whole batch, or places its part by itself.
        *got, value, norm = step(*got, step.shard_batch(batch) if number % 2 and jax.local_device_count() > 1 else batch)
        *want, wanted, wanted_norm = plain(*want, batch)
        worst = max(worst, abs(float(value) - float(wanted)), abs(float(norm) - float(wanted_norm)))
    apart, held = difference(jax.tree.leaves(got), jax.tree.leaves(want))
    for number in range(num_unblocked):
        *got, value, norm = step(*got, data[number % len(data)])
    sent = sum(step._last.entry.program.jitted.counts.moves.values())
    planned = sum(one.count for one in step.plan(*got, data[0]).transfers if one.what in (Moved.ACTIVATION, Moved.COTANGENT))
    print(
        f"process {jax.process_index()} of {jax.process_count()}, {stages} stages: {max(worst, apart):.1e} apart, {held} leaves, "
        f"{sent} of {planned} sent, {float(value):.6f}",
        flush=True,
    )
    if num_unblocked == 0 and stages == jax.process_count():
        report = step.verify(*got, data[0])
        print(f"process {jax.process_index()}, {stages} stages: verified {len(report.rows)} results: {report.ok}", flush=True)


if __name__ == "__main__":
    communication.init("gloo")
    jax.config.update("jax_enable_x64", True)
    for count in sys.argv[3:]:
        main(int(sys.argv[1]), int(sys.argv[2]), int(count))
