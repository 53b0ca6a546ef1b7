"""Asynchronous training on servers against synchronous training, on a small recommender.

    python -m benchmarks.ps_async [--workers 3] [--servers 2] [--updates 600] [--max-staleness 4]

Trains a wide and deep network on clicks that a hidden network draws. Every update of both modes has 60 clicks: a step in sync, one part
of a step in async. Prints the losses of unseen clicks after the same number of updates, and how many updates were late by how much.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

FIELDS, IDS, WIDTH, CLICKS = 6, 100, 8, 60


def parameters(seed: int, scale: float) -> Any:
    import jax

    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "wide": scale * jax.random.normal(keys[0], (FIELDS * IDS,)),
        "table": scale * jax.random.normal(keys[1], (FIELDS * IDS, WIDTH)),
        "deep": jax.random.normal(keys[2], (FIELDS * WIDTH, 32)) / (FIELDS * WIDTH) ** 0.5,
        "out": jax.random.normal(keys[3], (32,)) / 32**0.5,
    }


def logits(params: Any, ids: Any) -> Any:
    import jax.numpy as jnp

    deep = jnp.tanh(params["table"][ids].reshape(len(ids), -1) @ params["deep"]) @ params["out"]
    return params["wide"][ids].sum(1) + deep


def loss(params: Any, ids: Any, clicked: Any) -> Any:
    import optax

    return optax.sigmoid_binary_cross_entropy(logits(params, ids), clicked).mean()


def clicks(seed: int, count: int) -> Any:
    import jax
    import jax.numpy as jnp

    first, second = jax.random.split(jax.random.key(seed))
    ids = jax.random.randint(first, (count, FIELDS), 0, IDS) + IDS * jnp.arange(FIELDS)
    chance = jax.nn.sigmoid(logits(parameters(1, 1.0), ids))
    return ids, jax.random.bernoulli(second, chance).astype(jnp.float32)


def train(steps: int, size: int) -> None:
    """What each worker runs."""
    import jax
    import optax

    import spmdctx

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    @spmdctx.parallel(parallel_mode="stand_alone")
    def step(state: Any, ids: Any, clicked: Any) -> Any:
        params, own = state
        value, grads = spmdctx.value_and_grad(loss)(params, ids, clicked)
        updates, own = tx.update(grads, own, params)
        return (optax.apply_updates(params, updates), own), value

    params = parameters(0, 0.1)
    state = params, tx.init(params)
    for number in range(steps):
        state, _ = step(state, *clicks(2 + number, size))
    time.sleep(2)  # Others may have updates under way.
    unseen = loss(jax.tree.map(jax.numpy.asarray, state[0]), *clicks(1, 1 << 14))
    print(f"loss {float(unseen)!r}", flush=True)


def launched(mode: str, options: argparse.Namespace, steps: int, size: int) -> tuple[float, dict[str, Any]]:
    """Returns the loss, and what `launch` says."""
    flags = ["--servers", options.servers, "--workers", options.workers, "--mode", mode]
    flags += ["--max-staleness", options.max_staleness] if mode == "async" else []
    script = ["-m", "benchmarks.ps_async", "--train", steps, size]
    command = [sys.executable, "-m", "spmdctx", "launch", "--json", "--timeout", 300, *flags, *script]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    if done.returncode:
        raise SystemExit(done.stderr)
    losses = [float(line.split()[-1]) for line in done.stderr.splitlines() if "loss" in line]
    return losses[-1], json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--train", type=int, nargs=2, metavar=("STEPS", "CLICKS"), help="what workers run")
    options = parser.parse_args()
    if options.train:
        train(*options.train)
        return
    updates = options.updates // options.workers * options.workers
    for mode, parts in (("sync", 1), ("async", options.workers)):
        start = time.perf_counter()
        found, said = launched(mode, options, updates // parts, CLICKS * parts)
        late = ", ".join(f"{count} by {late}" for late, count in said["staleness"].items()) or "none"
        print(f"{mode:6} {said['updates']} updates, loss {found:.5f}, {time.perf_counter() - start:.1f} s; late: {late}", flush=True)


if __name__ == "__main__":
    main()
