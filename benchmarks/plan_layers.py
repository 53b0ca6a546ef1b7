"""Planning against tracing, for small layers: the processor's time of `plan` beside that of one `jax.jit(step).trace`.

    python -m benchmarks.plan_layers

Attention in several layouts of its heads, and `Plan.pareto` of small models. The programs are not those that the search was tuned on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import spmdctx

OPTIONS = {"parallel_mode": "auto_parallel", "device_num": 8, "topology": "tpu-v5e"}


def attention(layout: str, heads: int, groups: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A layer of attention with its gradient step; `layout` names the order of batch, heads and sequence."""
    batch, length, width, own = 16, 64, 96, 32

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        query, key, value = (jnp.einsum(f"bsd,dhk->{layout}", x, weights[name]) for name in ("query", "key", "value"))
        repeats = heads // groups
        place = layout.index("h")
        key, value = jnp.repeat(key, repeats, place), jnp.repeat(value, repeats, place)
        scores = jnp.einsum(f"{layout},{layout.replace('s', 't')}->bhst", query, key)
        mixed = jnp.einsum(f"bhst,{layout.replace('s', 't')}->{layout}", jax.nn.softmax(scores), value)
        return ((x + jnp.einsum(f"{layout},hkd->bsd", mixed, weights["out"])) ** 2).mean()

    def step(weights: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return jax.tree.map(lambda one, change: one - 0.1 * change, weights, jax.grad(loss)(weights, x))

    shapes = {"query": (width, heads, own), "key": (width, groups, own), "value": (width, groups, own), "out": (heads, own, width)}
    return step, ({name: jnp.ones(shape) for name, shape in shapes.items()}, jnp.ones((batch, length, width)))


def stack(widths: tuple[int, ...], act: Callable[[jax.Array], jax.Array]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A stack of matrices with its gradient step."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = act(x @ weight)
        return x.mean()

    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return jax.tree.map(lambda one, change: one - change, weights, jax.grad(loss)(weights, x))

    return step, ([jnp.ones(pair) for pair in itertools.pairwise(widths)], jnp.ones((64, widths[0])))


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the processor's time of an action, and its result."""
    start = time.process_time()
    found = action()
    return time.process_time() - start, found


def main() -> None:
    """Prints a row per program."""
    spmdctx.plan(*_flat(stack((8, 8), jnp.tanh)), **OPTIONS)
    print("attention              trace s  plan s  ratio")
    for layout, heads, groups in (("bhsk", 8, 8), ("bshk", 16, 4), ("hbsk", 4, 2), ("bhsk", 8, 1)):
        step, arguments = attention(layout, heads, groups)
        traced, _ = seconds(lambda step=step, arguments=arguments: jax.jit(step).trace(*arguments))
        planned, _ = seconds(lambda step=step, arguments=arguments: spmdctx.plan(step, *arguments, **OPTIONS))
        print(f"{layout} {heads:2} heads, {groups} groups  {traced:7.3f} {planned:7.3f} {planned / traced:6.1f}", flush=True)
    print("pareto                 trace s pareto s  ratio  points  unmet")
    for widths, act in (((96, 192, 96), jax.nn.silu), ((64, 80, 48, 64), jnp.tanh), ((128, 256), jax.nn.relu)):
        step, arguments = stack(widths, act)
        traced, _ = seconds(lambda step=step, arguments=arguments: jax.jit(step).trace(*arguments))
        plan = spmdctx.plan(step, *arguments, **OPTIONS)
        took, found = seconds(plan.pareto)
        print(f"{widths!s:22} {traced:7.3f} {took:8.3f} {took / traced:6.1f} {len(found.points):7} {len(found.unmet):6}", flush=True)


def _flat(made: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    return made[0], *made[1]


if __name__ == "__main__":
    main()
