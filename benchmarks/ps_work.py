"""What workers run while `ps_faults` kills them: a small step; each loss and the last state are said to the bit.

    spmdctx launch --servers 2 --workers 3 -m benchmarks.ps_work STEPS [--pause SECONDS] [--gates FOLDER] [--counts]

Before the step of a number it waits while FOLDER holds a file `gate-NUMBER`. With --counts two arrays count the
updates that they have had, and the last state is what they have come to.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(make: Callable[[], tuple[Any, Any, Any]] | None = None) -> None:
    """Trains what `make` returns: a step, its first state, and what makes the batch of a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--counts", action="store_true")
    arguments = parser.parse_args()

    import jax

    jax.config.update("jax_enable_x64", True)
    import numpy as np

    step, state, batch = counting() if arguments.counts else (make or made)()
    for number in range(arguments.steps):
        while arguments.gates is not None and (arguments.gates / f"gate-{number}").exists():
            time.sleep(0.02)
        before = sum(step.traffic.values())
        state, loss = step(state, batch(number))
        # A worker that was started again goes through the steps that are done without a pause.
        time.sleep(arguments.pause if sum(step.traffic.values()) > before else 0)
        print("STEP", number, float(loss).hex(), flush=True)
    if arguments.counts:
        time.sleep(2)  # others may have updates under way
        print("STATE", *(int(np.asarray(leaf)[0]) for leaf in jax.tree.leaves(state)), flush=True)
        return
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.asarray(leaf).tobytes())
    print("STATE", digest.hexdigest(), flush=True)


def made() -> tuple[Any, Any, Any]:
    """Returns a step, its first state, and what makes the batch of a step."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import spmdctx

    rng = np.random.default_rng(0)
    params = {"w1": jnp.asarray(rng.normal(size=(8, 16))), "w2": jnp.asarray(rng.normal(size=(16, 4))), "b": jnp.zeros(4)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(1e-2, 50)))

    @spmdctx.parallel(parallel_mode="stand_alone")
    def step(state: Any, batch: Any) -> Any:
        params, slots = state
        inputs, targets = batch

        def loss_of(params: Any) -> Any:
            return jnp.mean((jnp.tanh(inputs @ params["w1"]) @ params["w2"] + params["b"] - targets) ** 2)

        loss, gradients = spmdctx.value_and_grad(loss_of)(params)
        updates, slots = optimizer.update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    def batch(number: int) -> tuple[Any, Any]:
        own = np.random.default_rng(1000 + number)
        return own.normal(size=(12, 8)), own.normal(size=(12, 4))

    return step, (params, optimizer.init(params)), batch


def counting() -> tuple[Any, Any, Any]:
    """Returns the same of a step whose two arrays, which lie on two servers, count updates."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import spmdctx

    @spmdctx.parallel(parallel_mode="stand_alone")
    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return sum(map(jnp.sum, params)) * jnp.mean(batch)

        loss, gradients = spmdctx.value_and_grad(loss_of)(state)
        return jax.tree.map(jnp.add, state, gradients), loss

    return step, [jnp.zeros(8), jnp.zeros(8)], lambda number: np.ones(12)


if __name__ == "__main__":
    main()
