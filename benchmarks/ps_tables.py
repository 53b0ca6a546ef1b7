"""Measures a table that servers hold by rows: bytes of a step, memory of a worker, and steps per second against dense pushes.

    python -m benchmarks.ps_tables [--rows 20000000] [--steps 20]

The dense table is smaller; its seconds grow with its rows, since all of them are pushed and pulled.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

WIDTH, BATCH, FEATURES = 16, 1024, 8
DENSE_ROWS, SMALL_ROWS = 500_000, 100_000


def train(rows: int, steps: int, *, is_dense: bool) -> dict[str, float]:
    """Trains a recommender in a worker, and returns what was measured there.

    Args:
        rows: of the table.
        steps: that are measured, after one that is not.
        is_dense: whether the loss reads one row by a slice, too, so that the table crosses whole.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import spmdctx

    optimizer = optax.adagrad(0.05)

    def small(key: Any, shape: Any, dtype: Any) -> Any:
        return 0.01 * jax.random.normal(key, shape, dtype)

    @spmdctx.parallel(parallel_mode="stand_alone")
    def step(state: Any, batch: Any) -> Any:
        params, own = state
        ids, labels = batch

        def loss(params: Any) -> Any:
            logits = jnp.take(params["table"], ids, axis=0).reshape(len(ids), -1) @ params["tower"]
            logits += 0 * jnp.sum(params["table"][:1]) if is_dense else 0
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))

        value, gradients = spmdctx.value_and_grad(loss)(params)
        updates, own = optimizer.update(gradients, own, params)
        return (optax.apply_updates(params, updates), own), value

    key = jax.random.key(0)
    table = jnp.zeros((rows, WIDTH)) if is_dense else spmdctx.server_table((rows, WIDTH), init=small, key=key)
    params = {"table": table, "tower": jnp.ones(WIDTH * FEATURES) / WIDTH}
    state = params, spmdctx.server_init(optimizer.init, params)
    random = np.random.default_rng(0)
    touched, start, before = 0, 0.0, 0
    for number in range(steps + 1):
        ids = (random.zipf(1.2, (BATCH, FEATURES)) * 2654435761 + np.arange(FEATURES)) % rows
        state, value = step(state, (jnp.asarray(ids, jnp.int32), jnp.asarray(ids[:, 0] % 2, jnp.float32)))
        float(value)
        traffic = sum(step.traffic.values())
        touched += len(np.unique(ids)) * WIDTH * 4 if number else 0
        if not number:
            start, before = time.perf_counter(), traffic
    seconds = (time.perf_counter() - start) / steps
    crossed = (traffic - before) / steps
    return {
        "rows": rows,
        "step_ms": 1e3 * seconds,
        "bytes": crossed,
        "bytes_of_rows": 2 * touched / steps,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loss": float(value),
    }


def launched(rows: int, steps: int, *, is_dense: bool = False) -> dict[str, float]:
    """Trains with two servers and one worker, and returns what the worker measured."""
    command = [sys.executable, "-m", "spmdctx", "launch", "--servers", "2", "--workers", "1", "--timeout", "600"]
    command += ["--save-every", "1000", __file__]
    command += ["--rows", str(rows), "--steps", str(steps), "--worker", "dense" if is_dense else "rows"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or not lines:
        raise SystemExit(done.stdout + done.stderr)
    return {**json.loads(lines[-1][lines[-1].index("{") :]), "job_s": time.perf_counter() - start}


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worker", default="")
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(train(args.rows, args.steps, is_dense=args.worker == "dense")), flush=True)
        return
    small, dense, large = launched(SMALL_ROWS, args.steps), launched(DENSE_ROWS, 3, is_dense=True), launched(args.rows, args.steps)
    for name, found in (("small", small), ("dense", dense), ("large", large)):
        print(name, {key: round(value, 4) for key, value in found.items()})
    print(f"bytes of a step: {large['bytes'] / large['bytes_of_rows']:.3f} x those of its rows")
    print(f"peak memory of a worker: {large['peak_rss_mb']:.0f} MB, with {SMALL_ROWS} rows {small['peak_rss_mb']:.0f} MB")
    extrapolated = dense["step_ms"] * args.rows / DENSE_ROWS
    print(f"a step: {large['step_ms']:.1f} ms, dense {dense['step_ms']:.0f} ms for {DENSE_ROWS} rows, {extrapolated:.0f} ms for all:")
    print(f"{extrapolated / large['step_ms']:.0f} x the throughput of dense pushes")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
