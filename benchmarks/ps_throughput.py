"""How fast servers and workers exchange dense gradients and parameters, what a step costs the host, and how long a job takes to start.

    python -m benchmarks.ps_throughput [--servers 2] [--workers 2] [--steps 30] [--mode sync]

Trains 10.5 M float32 parameters by adam, whose gradients cost next to nothing, then 64 of them. Counts what all workers push and pull.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

LARGE, SMALL, ARRAYS = 10_500_000, 64, 10


def train(size: int, steps: int, start: float) -> None:
    """What each worker runs."""
    import jax
    import jax.numpy as jnp
    import optax

    import spmdctx

    tx = optax.adam(1e-3)

    def loss(params: Any, x: Any) -> Any:
        return sum(jnp.vdot(own, own) for own in params) * jnp.mean(x)

    @spmdctx.parallel(parallel_mode="stand_alone")
    def step(state: Any, x: Any) -> Any:
        params, own = state
        value, grads = spmdctx.value_and_grad(loss)(params, x)
        updates, own = tx.update(grads, own, params)
        return (optax.apply_updates(params, updates), own), value

    params = [jnp.ones(max(1, size // ARRAYS)) for _ in range(ARRAYS)]
    state, x = (params, tx.init(params)), jnp.ones(16)
    state, _ = step(state, x)
    print(f"start {time.time() - start:.2f}", flush=True)
    for _ in range(3):
        state, value = step(state, x)
    jax.block_until_ready(value)
    begun = time.perf_counter()
    for _ in range(steps):
        state, value = step(state, x)
    jax.block_until_ready(value)
    print(f"seconds {(time.perf_counter() - begun) / steps:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--train", nargs=3, metavar=("SIZE", "STEPS", "START"), help="what workers run")
    options = parser.parse_args()
    if options.train:
        size, steps, start = options.train
        train(int(size), int(steps), float(start))
        return
    for size, steps in ((LARGE, options.steps), (SMALL, 4 * options.steps)):
        flags = ["--servers", options.servers, "--workers", options.workers, "--mode", options.mode, "--save-every", 1 << 20]
        script = ["-m", "benchmarks.ps_throughput", "--train", size, steps, time.time()]
        command = [sys.executable, "-m", "spmdctx", "launch", "--timeout", 200, *flags, *script]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise SystemExit(done.stderr)
        words = [line.split() for line in done.stdout.splitlines()]
        starts = [float(line[-1]) for line in words if "start" in line]
        seconds = max(float(line[-1]) for line in words if "seconds" in line)
        moved = 2 * 4 * size * options.workers / 1e6
        print(
            f"{size} parameters: {1e3 * seconds:.1f} ms a step, {options.workers / seconds:.1f} worker-steps/s, {moved / seconds:.0f} MB/s;"
            f" first step done after {min(starts):.1f} s; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
