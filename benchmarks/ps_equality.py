"""Synchronous training on servers against one process that has no servers: the same losses and the same state.

    python -m benchmarks.ps_equality [--servers 2] [--workers 3] [--steps 50] [--model mlp] [--optimizer adam]

Trains each model by each optimizer in float64, a job for each pair. The step of one process is plain `jax.jit`, over whole batches.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad", "clip+adamw")
MODELS = ("mlp", "recommender", "decoder")
_ROWS, _FIELDS, _WORDS, _SEQ, _WIDTH = 3000, 4, 24, 10, 16


class Model(NamedTuple):
    """Its first parameters, its loss over a batch, and what makes the batch of a step."""

    parameters: Any
    loss: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.train:
        train(own.model, own.optimizer, own.steps)
        return
    for model in [own.model] if own.model else MODELS:
        for optimizer in [own.optimizer] if own.optimizer else OPTIMIZERS:
            print(f"{model:12} {optimizer:10} {job(own, model, optimizer)}", flush=True)


def job(own: argparse.Namespace, model: str, optimizer: str) -> str:
    """Returns what a job says."""
    command = [sys.executable, "-m", "spmdctx", "launch", "--servers", own.servers, "--workers", own.workers, "--timeout", 300]
    command += ["-m", "benchmarks.ps_equality", "--train", "--model", model, "--optimizer", optimizer, "--steps", own.steps]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    said = re.findall(r"^\[0\] DIFFERENCE (.*)$", done.stdout, re.MULTILINE)
    return said[0] if said and not done.returncode else f"failed: {done.stdout[-500:]}{done.stderr[-1500:]}"


def train(name: str, optimizer: str, steps: int) -> None:
    """What each worker runs; worker 0 compares."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import numpy as np
    import optax

    import spmdctx

    model, tx = made(name), transform(optimizer)

    def step(state: Any, batch: Any, value_and_grad: Any = spmdctx.value_and_grad) -> Any:
        params, own = state
        loss, grads = value_and_grad(model.loss)(params, *batch)
        updates, own = tx.update(grads, own, params)
        return (optax.apply_updates(params, updates), own), loss

    served, plain = spmdctx.parallel(step, parallel_mode="stand_alone", batch_argnames="batch"), jax.jit(step, static_argnums=2)
    state = other = (model.parameters, tx.init(model.parameters))
    losses, wanted = [], []
    for number in range(steps):
        state, loss = served(state, model.batch(number))
        losses.append(float(loss))
    for number in range(steps):
        other, loss = plain(other, model.batch(number), jax.value_and_grad)
        wanted.append(float(loss))
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True)
    worst = max(float(np.abs(np.asarray(own) - np.asarray(one)).max() / max(1.0, np.abs(np.asarray(one)).max())) for own, one in pairs)
    print("DIFFERENCE", f"state {worst:.1e}, losses {max(abs(own - one) for own, one in zip(losses, wanted, strict=True)):.1e}")


def transform(name: str) -> Any:
    """Returns an optimizer."""
    import optax

    rate = optax.cosine_decay_schedule(1e-2, 100)
    known = {
        "sgd": lambda: optax.sgd(0.1),
        "momentum": lambda: optax.sgd(0.05, momentum=0.9),
        "adam": lambda: optax.adam(rate),
        "adamw": lambda: optax.adamw(rate),
        "adagrad": lambda: optax.adagrad(0.1),
        "clip+adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(rate)),
    }
    return known[name]()


def made(name: str) -> Model:
    """Returns a model."""
    return {"mlp": _mlp, "recommender": _recommender, "decoder": _decoder}[name]()


def _weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5) for name, shape in shapes.items()}


def _mlp() -> Model:
    import jax.numpy as jnp
    import numpy as np

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(jnp.tanh(x @ params["first"]) @ params["second"]) @ params["third"] - y) ** 2)

    def batch(number: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(number)
        return rng.normal(size=(12, 8)), rng.normal(size=(12, 4))

    return Model(_weights(1, first=(8, 32), second=(32, 32), third=(32, 4)), loss, batch)


def _recommender() -> Model:
    import jax.numpy as jnp
    import numpy as np
    import optax

    def loss(params: Any, ids: Any, clicked: Any) -> Any:
        deep = jnp.tanh(params["table"][ids].reshape(len(ids), -1) @ params["deep"]) @ params["out"]
        return optax.sigmoid_binary_cross_entropy(params["wide"][ids][..., 0].sum(1) + deep[:, 0], clicked).mean()

    def batch(number: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(number)
        return (rng.zipf(1.3, size=(24, _FIELDS)) % _ROWS).astype(np.int32), rng.integers(0, 2, 24).astype(float)

    return Model(_weights(2, table=(_ROWS, 8), wide=(_ROWS, 1), deep=(8 * _FIELDS, 16), out=(16, 1)), loss, batch)


def _decoder() -> Model:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    def loss(params: Any, words: Any) -> Any:
        x = params["embed"][words[:, :-1]]
        for layer in range(2):
            q, k, v = (x @ params[f"{part}{layer}"] for part in "qkv")
            scores = jnp.where(jnp.tril(jnp.ones((_SEQ, _SEQ), bool)), q @ k.swapaxes(1, 2) / _WIDTH**0.5, -1e9)
            x = x + jax.nn.softmax(scores) @ v @ params[f"o{layer}"]
            x = x + jax.nn.gelu(x @ params[f"up{layer}"]) @ params[f"down{layer}"]
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean()

    def batch(number: int) -> tuple[Any, ...]:
        return (np.random.default_rng(number).integers(0, _WORDS, (12, _SEQ + 1)).astype(np.int32),)

    shapes: dict[str, tuple[int, ...]] = {"embed": (_WORDS, _WIDTH)}
    for layer in range(2):
        shapes |= {f"{part}{layer}": (_WIDTH, _WIDTH) for part in "qkvo"}
        shapes |= {f"up{layer}": (_WIDTH, 4 * _WIDTH), f"down{layer}": (4 * _WIDTH, _WIDTH)}
    return Model(_weights(3, **shapes), loss, batch)


if __name__ == "__main__":
    main()
