"""Pipelines of a scan over layers on the processes of a job, against one device: run by `spmdctx launch`.

Arguments: a folder for the checkpoint of each pipeline's last state, and pipelines as "stages:chunks of each stage".
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import spmdctx
from spmdctx import communication
from spmdctx.pipeline.programs.transfers import Moved
from tests.processes import work_pipeline as work

LAYERS, WIDTH, STEPS = 8, 8, 3


def create(key):
    first, own = jax.random.split(key)
    layers = {"w": jax.random.normal(own, (LAYERS, WIDTH, WIDTH), jnp.float64) / 3, "b": jnp.zeros((LAYERS, WIDTH))}
    params = {"embed": jax.random.normal(first, (12, WIDTH), jnp.float64), "layers": layers}
    return params, work.OPTIMIZER.init(params)


def loss(params, batch):
    x = params["embed"][batch["words"]]
    x, _ = jax.lax.scan(lambda x, own: (x + jnp.tanh(x @ own["w"] + own["b"]), None), x, params["layers"])
    logits = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(logits, batch["targets"][:, None], -1))


def step_of(grad):
    def train_step(params, state, batch):
        value, gradient = grad(params, batch)
        update, state = work.OPTIMIZER.update(gradient, state, params)
        return optax.apply_updates(params, update), state, value

    return train_step


def parallel(stages, chunks=1):
    grad = spmdctx.value_and_grad(spmdctx.PipelineCell(loss, micro_size=work.MICRO))
    options = {"pipeline_stages": stages} if stages > 1 else {}
    if chunks > 1:
        options |= {"pipeline_config": {"pipeline_interleave": True}, "pipeline_segments": chunks}
    return spmdctx.parallel(step_of(grad), parallel_mode="auto_parallel", topology="cpu", **options)


def main(folder, stages, chunks):
    step, data, key = parallel(stages, chunks), work.batches(STEPS), jax.random.key(0)
    got, want = step.init(create, key, batch=data[0]), create(key)
    plain, worst = jax.jit(step_of(jax.value_and_grad(loss))), 0.0
    for batch in data:
        *got, value = step(*got, batch)
        *want, wanted = plain(*want, batch)
        worst = max(worst, abs(float(value) - float(wanted)))
    apart, _ = work.difference(jax.tree.leaves(got), jax.tree.leaves(want))
    layers = [shard.data.shape[0] for leaf in jax.tree.leaves(got[0]["layers"]) for shard in leaf.addressable_shards]
    around = step._last.entry.program.jitted.counts.around
    sent = sum(count for route, (count, _) in around.items() if route.what in (Moved.WEIGHT, Moved.GRADIENT))
    with spmdctx.CheckpointManager(Path(folder) / f"{stages}_{chunks}") as checkpoints:
        checkpoints.save(STEPS, {"state": got})
    print(
        f"process {jax.process_index()}, {stages} stages of {chunks}: {max(worst, apart):.1e} apart, {max(layers)} layers on a device, "
        f"{sent} sent, {float(value).hex()}",
        flush=True,
    )


if __name__ == "__main__":
    communication.init("gloo")
    jax.config.update("jax_enable_x64", True)
    for pipeline in sys.argv[2:]:
        main(sys.argv[1], *map(int, pipeline.split(":")))
