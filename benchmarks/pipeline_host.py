"""The host's time for a task of a pipeline, and over that of a plain `jax.jit` dispatch.

    python -m benchmarks.pipeline_host [--pairs 60]

Runs a step of a small pipeline, and as many calls of a jitted function as the step has tasks, in turn, so that both see the same
machine. Prints the medians and the median of the ratios. Tasks take next to no time by themselves, and each stage has one device.

Also prints the host's share of a step whose tasks take 20 ms. The step would take as long as its simulated schedule; the host's time is
that of all tasks, one after the other, as if it hid behind nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp

import spmdctx
from spmdctx.pipeline.schedule.orders import one_f_one_b
from spmdctx.pipeline.schedule.simulate import simulate

STAGES, MICRO, LAYERS, WIDTH = 4, 16, 8, 8
TASK_S = 0.020


def loss(params: Any, x: Any) -> Any:
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2)


def train_step(params: Any, x: Any) -> Any:
    value, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(loss, micro_size=MICRO))(params, x)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient), value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    pairs = parser.parse_args().pairs
    layers = [{"w": jax.random.normal(key, (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)} for key in jax.random.split(jax.random.key(0), LAYERS)]
    x = jnp.ones((2 * MICRO, WIDTH))
    step = spmdctx.parallel(train_step, parallel_mode="auto_parallel", pipeline_stages=STAGES, topology="cpu")
    params, value = step(layers, x)
    x = step.shard_batch(x)
    plain = jax.jit(lambda *own: [array + 1 for array in own])
    arrays = [jnp.ones((WIDTH, WIDTH))] * 6
    tasks = 2 * STAGES * MICRO

    def pipelined() -> float:
        nonlocal params, value
        start = time.perf_counter()
        params, value = step(params, x)
        jax.block_until_ready((params, value))
        return (time.perf_counter() - start) / tasks * 1e6

    def dispatched() -> float:
        start = time.perf_counter()
        for _ in range(tasks):
            made = plain(*arrays)
        jax.block_until_ready(made)
        return (time.perf_counter() - start) / tasks * 1e6

    for run in (pipelined, dispatched) * 3:
        run()
    found = [(pipelined(), dispatched()) for _ in range(pairs)]
    each, alone = (statistics.median(own) for own in zip(*found, strict=True))
    ratio = statistics.median(one / other for one, other in found)
    print(f"{datetime.date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}")
    print(f"{tasks} tasks of {STAGES} stages: {each:.0f} us a task, least {min(one for one, _ in found):.0f}; all of the step is counted")
    print(f"a plain call with {len(arrays)} arrays: {alone:.0f} us; ratio {ratio:.1f}")
    step_s, host_s = simulate(one_f_one_b(STAGES, MICRO), lambda _: TASK_S).makespan_s, each * tasks / 1e6
    print(f"tasks of {TASK_S * 1e3:.0f} ms make a step of {step_s * 1e3:.0f} ms; the host's share of it: {host_s / step_s:.2%}")


if __name__ == "__main__":
    main()
