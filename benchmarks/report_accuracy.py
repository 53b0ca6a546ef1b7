"""The seconds and FLOP/s that `step.report()` gives are those of a clock by hand, and asking for them costs next to nothing.

    python -m benchmarks.report_accuracy [--devices 1,8] [--rounds 20] [--calls 10] [--step-ms 60]

In one process, in rounds: a loop that waits for each step is timed by hand and then asked for its report, and so is one that does not.
Then a report, or a line of metrics, behind each call, over the time of a call. Ratios are within a round; their medians are printed. CPUs
have no rate on a data sheet, hence no MFU: its numerator, FLOP/s, is compared with operations counted by hand.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import spmdctx

LAYERS, WIDTH = 4, 512


class Loop(NamedTuple):
    """A step with its state: a call, a call with a few rows, after which its reports count anew, and its operations counted by hand."""

    step: Any
    advance: Callable[[], Any]
    restart: Callable[[], Any]
    flops: int


def loop_of(devices: int, width: int, rows: int) -> Loop:
    """Returns a step of layers; each has one product forward and two backward, but the first, whose input has no gradient."""

    def train(params: list[jax.Array], x: jax.Array) -> Any:
        def loss(params: list[jax.Array]) -> jax.Array:
            hidden = x
            for w in params:
                hidden = jnp.tanh(hidden @ w)
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(params)
        return [old - 0.01 * new for old, new in zip(params, grads, strict=True)], value

    step = spmdctx.parallel(train, parallel_mode="semi_auto_parallel", device_num=devices, donate_argnums=0)
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    state = [[jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]]
    x = jax.random.normal(keys[0], (rows, width))

    def advance(x: jax.Array = x) -> Any:
        state[0], value = step(state[0], x)
        return value

    return Loop(step, advance, lambda: advance(x[:devices]), (3 * LAYERS - 1) * 2 * rows * width**2)


def sized(devices: int, step_s: float) -> tuple[Loop, int]:
    """Returns a loop whose step takes at least so long, and its number of rows."""
    rows = 256
    while True:
        loop = loop_of(devices, WIDTH, rows)
        jax.block_until_ready(loop.advance())
        if statistics.median(waited(loop, 5)) >= step_s:
            return loop, rows
        rows *= 2


def waited(loop: Loop, calls: int) -> list[float]:
    """Returns the seconds of calls that wait for their steps, one by one, by the clock."""
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(loop.advance())
        found.append(time.perf_counter() - start)
    return found


def queued(loop: Loop, calls: int) -> float:
    """Returns the mean seconds of calls that do not wait, by the clock around them."""
    start = time.perf_counter()
    for _ in range(calls):
        value = loop.advance()
    jax.block_until_ready(value)
    return (time.perf_counter() - start) / calls


def accuracy(loop: Loop, calls: int, *, waits: bool) -> tuple[float, float]:
    """Returns the report's seconds of a step over those by hand, and its FLOP/s over those by hand."""
    jax.block_until_ready(loop.restart())
    jax.block_until_ready(loop.advance())  # the first call has a row of its own in the report
    # A report times calls from one to the next, which the last one does not have.
    hand = statistics.median(waited(loop, calls)[:-1]) if waits else queued(loop, calls)
    found = loop.step.report()
    return found.step_s / hand, found.flops_per_s * found.num_devices / (loop.flops / hand)


def share(loop: Loop, calls: int, after: Callable[[Any], Any]) -> float:
    """Returns the seconds of what is done after a call that has ended, over those of the call."""
    steps, others = [], []
    for _ in range(calls):
        steps += waited(loop, 1)
        value = jax.block_until_ready(loop.advance())
        start = time.perf_counter()
        after(value)
        others.append(time.perf_counter() - start)
    return statistics.median(others) / statistics.median(steps)


def measured(devices: int, rounds: int, calls: int, step_s: float) -> list[str]:
    """Returns the rows of one number of devices."""
    loop, rows = sized(devices, step_s)
    hand = statistics.median(waited(loop, calls))
    found: dict[str, list[float]] = {}

    def add(what: str, *figures: float) -> None:
        for place, figure in enumerate(figures):
            found.setdefault(what.split(" | ")[place], []).append(figure)

    with tempfile.TemporaryDirectory() as folder, spmdctx.Metrics(Path(folder) / "run.jsonl") as metrics:
        for number in range(rounds):
            order: Sequence[bool] = (True, False) if number % 2 else (False, True)
            for waits in order:
                kind = "waits" if waits else "does not wait"
                add(f"step time, loop {kind} | FLOP/s, loop {kind}", *accuracy(loop, calls, waits=waits))
            add("report() behind a call", share(loop, calls, lambda _: loop.step.report()))
            add("Metrics.write behind a call", share(loop, calls, lambda value: metrics.write(0, loss=value)))
    lines = [f"{devices} devices, {LAYERS} layers of {WIDTH}, {rows} rows, a step of {1e3 * hand:.0f} ms: {rounds} rounds of {calls} calls"]
    return [*lines, *[f"  {what}: {_spread(ratios)}" for what, ratios in found.items()]]


def _spread(ratios: Sequence[float]) -> str:
    quarters = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.4f} (quartiles {quarters[0]:.4f} to {quarters[2]:.4f})"


def main() -> None:
    """Prints a block for each number of devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,8")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--step-ms", type=float, default=60)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.devices.split(",")]
    jax.config.update("jax_num_cpu_devices", max(counts))
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions}")
    for count in counts:
        print("\n".join(measured(count, arguments.rounds, arguments.calls, arguments.step_ms / 1e3)), flush=True)


if __name__ == "__main__":
    main()
