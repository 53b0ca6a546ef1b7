"""Planning takes no longer than tracing once: all of `plan` but the trace, against the first `jax.jit(step).trace`.

    python -m benchmarks.plan_speed [--samples 5] [--devices 8,64,4096] [--model llama2-7b] [--layers 32] [--modes ...] [--scan]

Every sample is a fresh process: one that plans the step, and one that only traces it. The median ratio must be at most 1 on the
first number of devices, that of recursive_programming at most 0.3, and no process may use more than 4 GB. `--model attention` plans one
layer of attention, whose trace takes some hundredths of a second; its ratio must be at most 20. A name of `plan_programs` plans one of
those steps on plain pytrees, where `--layers` is the least size of the batch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

PARALLEL_MODES = {"data_parallel": "none", "semi_auto_parallel": "megatron"}
SEARCH_MODES = {"sharding_propagation": "pins", "recursive_programming": "none", "dynamic_programming": "none"}
SPLITS = {**PARALLEL_MODES, **SEARCH_MODES}
"""What is measured: parallel modes, and the search modes of auto_parallel, each with the strategies that the model is given."""
MODEL_SLICES = 4
MAX_RATIOS = {"recursive_programming": 0.3}
MAX_RATIO, MAX_BYTES = 1.0, 4e9
ATTENTION, MAX_ATTENTION_RATIO = "attention", 20.0


class Seconds(NamedTuple):
    """Wall clock, and time of the processor, which other people on the machine disturb less."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Seconds) -> Seconds:
        return Seconds(self.wall - start.wall, self.cpu - start.cpu)


def make_step(model: str, layers: int, mode: str, num_devices: int, *, scan: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The pure training step with the strategies that go with a mode, and abstract arguments."""
    if model == ATTENTION:
        return attention_step()
    from benchmarks.plan_programs import PROGRAMS

    if model in PROGRAMS:
        return PROGRAMS[model](max(layers, num_devices))
    from spmdctx.models import Split, abstract_program, preset, pure_step

    model_slices = 1 if SPLITS[mode] == "none" else min(MODEL_SLICES, num_devices)
    split = Split(SPLITS[mode], num_devices // model_slices, model_slices)  # type: ignore[arg-type]  # the kinds come from a table of names
    config = replace(preset(model), num_layers=layers, scan_layers=scan)
    _, (decoder, optimizer, batch) = abstract_program(config, max(8, num_devices), split=split)
    step, state = pure_step(decoder, optimizer)
    return step, (state, batch)


def attention_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One layer of attention whose eight heads share two keys and values, with gradient descent."""
    import jax
    import jax.numpy as jnp

    def loss(weights: dict[str, Any], x: Any) -> Any:
        query, key, value = (jnp.einsum("bsd,dhk->bshk", x, weights[name]) for name in "qkv")
        heads = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return jnp.mean((x + jnp.einsum("bshk,hkd->bsd", heads, weights["o"])) ** 2)

    def step(weights: dict[str, Any], x: Any) -> tuple[dict[str, Any], Any]:
        found, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda weight, gradient: weight - gradient, weights, gradients), found

    shapes = {"q": (64, 8, 16), "k": (64, 2, 16), "v": (64, 2, 16), "o": (8, 16, 64)}
    return step, (
        {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()},
        jax.ShapeDtypeStruct((8, 32, 64), "float32"),
    )


def options_of(mode: str, num_devices: int, max_mesh_axes: int) -> dict[str, Any]:
    options: dict[str, Any] = {"device_num": num_devices, "topology": "tpu-v5p", "max_mesh_axes": max_mesh_axes}
    if mode in SEARCH_MODES:
        return {**options, "parallel_mode": "auto_parallel", "search_mode": mode}
    return {**options, "parallel_mode": mode}


def sample_plan(step: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Seconds, Seconds]:
    """All of `plan`, and the part of it in which JAX traces."""
    import jax

    import spmdctx

    plan = spmdctx.plan  # its import belongs to neither
    make_jaxpr, spent, inside = jax.make_jaxpr, [Seconds(0.0, 0.0)], []

    def timed(fn: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        trace = make_jaxpr(fn, **how)

        def run(*leaves: Any) -> Any:
            # A trace inside of a trace is a part of it.
            if inside:
                return trace(*leaves)
            inside.append(fn)
            start = Seconds.now()
            result = trace(*leaves)
            spent.append(Seconds.now().since(start))
            inside.pop()
            return result

        return run

    jax.make_jaxpr = timed  # type: ignore[assignment]  # jax's function is replaced to time it
    start = Seconds.now()
    plan(step, *arguments, **options)
    total = Seconds.now().since(start)
    return total, Seconds(*map(sum, zip(*spent, strict=True)))


def sample_trace(step: Callable[..., Any], arguments: tuple[Any, ...], mode: str) -> Seconds:
    """The first trace of the step by itself; `shard()` marks its regions as when it is planned."""
    import jax

    import spmdctx

    with spmdctx.auto_parallel_context(parallel_mode=mode if mode in PARALLEL_MODES else "auto_parallel"):
        start = Seconds.now()
        jax.jit(step).trace(*arguments)
        return Seconds.now().since(start)


def worker(kind: str, model: str, layers: int, mode: str, num_devices: int, scan: bool, max_mesh_axes: int) -> dict[str, Any]:
    """One sample, in this process."""
    import jax

    jax.devices()  # starting the backend belongs to neither
    step, arguments = make_step(model, layers, mode, num_devices, scan=scan)
    if kind == "trace":
        figures = {"trace": sample_trace(step, arguments, mode)}
    else:
        total, traced = sample_plan(step, arguments, options_of(mode, num_devices, max_mesh_axes))
        figures = {"plan": total.since(traced), "inner_trace": traced}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {**figures, "peak_bytes": peak}


def run_worker(kind: str, *words: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.plan_speed", "--worker", kind, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(arguments: argparse.Namespace, mode: str, num_devices: int) -> tuple[float, float]:
    """Prints one row; returns the ratio and the largest memory."""
    words = (arguments.model, arguments.layers, mode, num_devices, int(arguments.scan), arguments.max_mesh_axes)
    plans, traces = [], []
    for _ in range(arguments.samples):  # in turn, so that both see the same machine
        plans.append(run_worker("plan", *words))
        traces.append(run_worker("trace", *words))
    columns = {}
    for index, clock in enumerate(("wall", "cpu")):
        plan = statistics.median(row["plan"][index] for row in plans)
        trace = statistics.median(row["trace"][index] for row in traces)
        columns[clock] = (plan, trace, plan / trace)
    peak = max(row["peak_bytes"] for row in plans)
    text = "  ".join(f"{clock} {plan:6.3f} / {trace:6.3f} s = {ratio:5.2f}" for clock, (plan, trace, ratio) in columns.items())
    print(f"{mode:<22} {num_devices:>5} devices  {text}  peak {peak / 1e9:.2f} GB", flush=True)
    return columns["wall"][2], peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--devices", default="8")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--modes", default=",".join(SPLITS))
    parser.add_argument("--scan", action="store_true", help="run the layers by one scan")
    parser.add_argument("--max-mesh-axes", type=int, default=2, help="of the meshes that dynamic_programming tries")
    parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, model, layers, mode, num_devices, scan, max_mesh_axes = arguments.worker
        print(json.dumps(worker(kind, model, int(layers), mode, int(num_devices), scan == "1", int(max_mesh_axes))))
        return 0
    import flax
    import jax

    print(f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", end="")
    print(f", jax {jax.__version__}, flax {flax.__version__}; {arguments.model}, {arguments.layers} layers, median of {arguments.samples}")
    print("plan without tracing / first jax.jit(step).trace")
    counts = [int(count) for count in arguments.devices.split(",")]
    modes = arguments.modes.split(",")
    rows = {(mode, count): measure(arguments, mode, count) for count in counts for mode in modes}
    most = dict.fromkeys(modes, MAX_ATTENTION_RATIO) if arguments.model == ATTENTION else {**dict.fromkeys(modes, MAX_RATIO), **MAX_RATIOS}
    fits = all(rows[mode, counts[0]][0] <= most[mode] for mode in modes)
    return 0 if fits and all(peak < MAX_BYTES for _, peak in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
