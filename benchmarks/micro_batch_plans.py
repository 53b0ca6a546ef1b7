"""Plans of steps whose batch goes in micro-batches and whose memory binds: `python -m benchmarks.micro_batch_plans [PATTERN]`.

Four training steps on plain pytrees with Adam. For each: the processor's seconds for the plan without the trace, the step that is
planned, its gap and mesh, the likely and the safe peak beside what a device has, and how many gradients are reduced once per step.
Nothing is compiled.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import spmdctx
from benchmarks.plan_programs import Weights, _arrays, _attention, _block_shapes, _cross_entropy, _gated, _norm
from spmdctx.gradients import capture as gradients

LOW = jnp.bfloat16
Case = tuple[Callable[..., Any], Any, tuple[Any, ...], str, int, int]
"""The loss, its weights, its batch, the machine, the number of devices and of micro-batches."""


def _block(one: Weights, x: Any, heads: int, *, causal: bool = True) -> Any:
    x = x + _attention(one, _norm(x, one["n1"].astype(x.dtype)), heads, causal=causal)
    return x + _gated(one, _norm(x, one["n2"].astype(x.dtype)))


def writer(layers: int, width: int, heads: int, batch: int, length: int, *, scan: bool) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """A recomputed decoder whose table is its head."""

    def loss(weights: Weights, words: Any) -> Any:
        x = weights["table"].astype(LOW)[words[:, :-1]]
        layer = jax.checkpoint(lambda x, one: _block(one, x, heads))
        if scan:
            x = jax.lax.scan(lambda x, one: (layer(x, one), None), x, weights["layers"])[0]
        else:
            for one in weights["layers"]:
                x = layer(x, one)
        return _cross_entropy(x @ weights["table"].astype(LOW).T, words[:, 1:])

    block = _block_shapes(width, 3 * width)
    stacked = {name: (layers, *shape) for name, shape in block.items()}
    weights = _arrays({"table": (49152, width), "layers": stacked if scan else [block] * layers})
    return loss, weights, (jax.ShapeDtypeStruct((batch, length + 1), "int32"),)


def pictures(layers: int, width: int, heads: int, batch: int) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """A recomputed transformer of patches."""

    def loss(weights: Weights, patches: Any, labels: Any) -> Any:
        x = patches.astype(LOW) @ weights["into"].astype(LOW)
        for one in weights["layers"]:
            x = jax.checkpoint(lambda x, one: _block(one, x, heads, causal=False))(x, one)
        return _cross_entropy(jnp.mean(x, 1) @ weights["head"].astype(LOW), labels)

    shapes = {"into": (588, width), "head": (width, 1000), "layers": [_block_shapes(width, 2 * width)] * layers}
    batches = jax.ShapeDtypeStruct((batch, 256, 588), "float32"), jax.ShapeDtypeStruct((batch,), "int32")
    return loss, _arrays(shapes), batches


def experts(layers: int, width: int, count: int, batch: int, length: int) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """A decoder in which every token passes all experts, weighed by a softmax."""

    def loss(weights: Weights, words: Any) -> Any:
        x = weights["table"].astype(LOW)[words[:, :-1]]

        def layer(x: Any, one: Weights) -> Any:
            x = x + _attention(one, _norm(x, one["n1"].astype(LOW)), 16, causal=True)
            y = _norm(x, one["n2"].astype(LOW))
            shares = jax.nn.softmax((y @ one["gate"].astype(LOW)).astype(jnp.float32)).astype(LOW)
            inner = jax.nn.gelu(jnp.einsum("blw,ewh->eblh", y, one["up"].astype(LOW)))
            return x + jnp.einsum("eblh,ehw,ble->blw", inner, one["down"].astype(LOW), shares)

        for one in weights["layers"]:
            x = jax.checkpoint(layer)(x, one)
        return _cross_entropy(x @ weights["head"].astype(LOW), words[:, 1:])

    own = {**dict.fromkeys("qkvo", (width, width)), "n1": (width,), "n2": (width,), "gate": (width, count)}
    own |= {"up": (count, width, 2 * width), "down": (count, 2 * width, width)}
    weights = _arrays({"table": (32000, width), "head": (width, 32000), "layers": [own] * layers})
    return loss, weights, (jax.ShapeDtypeStruct((batch, length + 1), "int32"),)


CASES: dict[str, Callable[[], Case]] = {
    "writer": lambda: (*writer(32, 6144, 48, 128, 2048, scan=False), "tpu-v5e", 64, 16),
    "writer scanned": lambda: (*writer(24, 5120, 40, 64, 4096, scan=True), "tpu-v6e", 16, 8),
    "pictures": lambda: (*pictures(40, 3072, 24, 4096), "tpu-v5e", 16, 8),
    "experts": lambda: (*experts(16, 3072, 8, 128, 2048), "h100", 32, 8),
}


def _row(case: Case) -> str:
    loss, weights, batch, machine, devices, micro = case
    tool = optax.adamw(1e-4)

    def step(state: Any, *batch: Any) -> Any:
        value, slopes = spmdctx.value_and_grad(loss)(state[0], *batch)
        updates, moments = tool.update(slopes, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    run = spmdctx.parallel(
        step,
        parallel_mode="auto_parallel",
        device_num=devices,
        topology=machine,
        grad_accumulation_step=micro,
        donate_argnums=0,
        batch_argnums=tuple(range(1, 1 + len(batch))),
    )
    traced: list[float] = []

    def capture(*arguments: Any) -> Any:
        start = time.process_time()
        found = own(*arguments)
        traced.append(time.process_time() - start)
        return found

    from spmdctx.step.pipelined import make

    own = gradients.capture_step
    make.capture_step = capture
    start = time.process_time()
    plan = run.plan((weights, jax.eval_shape(tool.init, weights)), *batch)
    seconds = time.process_time() - start
    entry: Any = run._entry_of(((weights, jax.eval_shape(tool.init, weights)), *batch), {})
    priced = entry.planned.priced
    mesh = " x ".join(map(str, plan.mesh.values()))
    peaks = f"{plan.cost.memory_bytes / 2**30:.1f} (safe {plan.safe_memory_bytes / 2**30:.1f}) of "
    peaks += f"{entry.environment.settings.topology.memory_bytes / 2**30:.1f}"
    gap = "-" if plan.gap is None else f"{plan.gap:.2%}"
    figures = (f"{seconds - sum(traced):.1f}", f"{sum(traced):.1f}", f"{plan.cost.total_s:.3f}", gap, mesh, peaks)
    return " | ".join((*figures, str(len(priced.loop_sums.totals))))


def main() -> int:
    """Plans the programs whose names hold a pattern, and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="part of a program's name, a regular expression")
    arguments = parser.parse_args()
    print(f"{datetime.date.today()}, jax {jax.__version__}")
    print("program | plan s | trace s | step s | gap | mesh | GiB | sums that wait")
    for name, make in CASES.items():
        if re.search(arguments.pattern, name):
            print(f"{name} | {_row(make())}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
