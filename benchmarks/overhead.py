"""A decorated step costs little more per call than jax.jit with the same shardings, and nnx no more than nnx.jit.

    python -m benchmarks.overhead [--pairs 400]    # JAX_PLATFORMS=cuda: on GPUs

Runs the decorated and the plain step in turn, so that both see the same machine, and prints the median of the ratios.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import spmdctx

NUM_LAYERS, WIDTH, BATCH = 24, 128, 64
Advance = Callable[[], None]


def pytree_step(params: list[dict[str, Any]], momentum: list[dict[str, Any]], batch: dict[str, Any]) -> Any:
    def loss(params: list[dict[str, Any]]) -> Any:
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, value


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(NUM_LAYERS)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def nnx_step(model: Stack, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> Any:
    value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, gradients)
    return value


def make_batch() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(2, BATCH, WIDTH)).astype(np.float32)
    return {"x": x[0], "y": x[1]}


def pytree_pair() -> tuple[Advance, Advance, int]:
    keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
    params = [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5, "b": jnp.zeros(WIDTH)} for key in keys]
    momentum = jax.tree.map(jnp.zeros_like, params)
    step = spmdctx.parallel(pytree_step, parallel_mode="data_parallel")
    arguments = (params, momentum, make_batch())
    shardings = step.in_shardings(*arguments)
    plain = jax.jit(pytree_step, in_shardings=shardings, out_shardings=step.out_shardings(*arguments))
    state, momentum, batch = jax.device_put(arguments, shardings)

    def loop(run: Callable[..., Any]) -> Advance:
        carried = (state, momentum)

        def advance() -> None:
            nonlocal carried
            *carried, value = run(*carried, batch)  # type: ignore[assignment]  # the step's results are untyped pytrees
            value.block_until_ready()

        return advance

    return loop(step), loop(plain), len(jax.tree.leaves(arguments))


def nnx_pair() -> tuple[Advance, Advance, int]:
    import optax

    def make() -> tuple[Stack, nnx.Optimizer]:
        model = Stack(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.01, momentum=0.9), wrt=nnx.Param)

    step = spmdctx.parallel(nnx_step, parallel_mode="data_parallel")
    model, optimizer = make()
    batch = make_batch()
    batch = jax.device_put(batch, step.in_shardings(model, optimizer, batch)[2])
    whole = jax.sharding.NamedSharding(batch["x"].sharding.mesh, jax.sharding.PartitionSpec())
    other = make()
    nnx.update(other, jax.device_put(nnx.state(other), whole))
    plain = nnx.jit(nnx_step)

    def loop(run: Callable[..., Any], objects: tuple[Any, Any]) -> Advance:
        return lambda: run(*objects, batch).block_until_ready() and None

    return loop(step, (model, optimizer)), loop(plain, other), len(jax.tree.leaves((nnx.state((model, optimizer)), batch)))


def timed(advance: Advance) -> float:
    start = time.perf_counter()
    advance()
    return time.perf_counter() - start


def measure(name: str, pair: Callable[[], tuple[Advance, Advance, int]], num_pairs: int) -> None:
    ours, plain, num_leaves = pair()
    for _ in range(10):
        ours()
        plain()
    ratios, extra, times = [], [], []
    for index in range(num_pairs):
        order = (ours, plain) if index % 2 else (plain, ours)
        seconds = {advance: timed(advance) for advance in order}
        ratios.append(seconds[ours] / seconds[plain])
        extra.append(seconds[ours] - seconds[plain])
        times.append(seconds[plain])
    low, _, high = statistics.quantiles(ratios)
    print(
        f"{name:7}{num_leaves:4d} leaves  step {statistics.median(times) * 1e3:6.2f} ms  median ratio {statistics.median(ratios):.4f}"
        f"  (quartiles {low:.4f} {high:.4f})  median difference {statistics.median(extra) * 1e6:+.0f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=400, help="pairs of calls")
    arguments = parser.parse_args()
    print(f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", end="")
    print(f", jax {jax.__version__}, flax {flax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}")
    measure("pytree", pytree_pair, arguments.pairs)
    measure("nnx", nnx_pair, arguments.pairs)


if __name__ == "__main__":
    main()
