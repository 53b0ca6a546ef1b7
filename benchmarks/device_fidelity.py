"""Time and memory of whole training steps on the one device at hand, beside the plan's and beside `jax.jit`'s.

    JAX_PLATFORMS=cuda python -m benchmarks.device_fidelity [--only REGEX] [--topology FILE] [--compile-only] [--calls N]

Each program runs in a process of its own, with donated state: first decorated, so that the allocator's peak is its peak, then in turn
with `jax.jit` of the same step. `--topology` adds the plan's time for what `spmdctx calibrate` measured. Memory is in GiB: the plan's
peak, what the compiler assigned (arguments, results and temporaries), the allocator's peak; `--compile-only` adds what the compiler
assigns for an H100 that it does not see.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

GIB = 2**30
DECODER: dict[str, Any] = {"vocab_size": 32000, "max_seq": 2048, "dtype": "bfloat16"}
DECODERS: dict[str, tuple[dict[str, Any], int]] = {
    "decoder-160m": ({"width": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "hidden": 2048}, 8),
    "decoder-400m-remat": ({"width": 1024, "num_layers": 24, "num_heads": 16, "num_kv_heads": 4, "hidden": 2816, "remat": True}, 16),
    "decoder-1b-scan": (
        {"width": 2048, "num_layers": 16, "num_heads": 16, "num_kv_heads": 8, "hidden": 5632, "remat": True, "scan_layers": True},
        8,
    ),
    "decoder-long": ({"width": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "hidden": 2816, "max_seq": 8192}, 1),
}
"""Sizes and batch of decoders that train by AdamW on float32 parameters, with products in bfloat16."""

ZOO = ("mlp", "transformer", "encoder_decoder", "moe", "vit", "gshard", "unet")
PROGRAMS = (*DECODERS, *ZOO)


def program_of(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A pure step `(state, *batch) -> (state, loss)` and the shapes of its arguments."""
    from benchmarks.judge_models import decoder_program, zoo_program
    from spmdctx.models import DecoderConfig
    from tests.zoo import UNSPLIT

    if name in DECODERS:
        sizes, batch = DECODERS[name]
        return decoder_program(DecoderConfig(**{**DECODER, **sizes}), batch)
    return zoo_program(name, UNSPLIT)


def values_of(shapes: Any) -> Any:
    """Small normal values and low numbers on the device, one leaf at a time."""
    import jax
    import jax.numpy as jnp

    def made(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            # Equal ids would add to one row of a table, one after the other.
            return jax.random.randint(jax.random.key(1), leaf.shape, 0, 256, jnp.int32).astype(leaf.dtype)
        # Second moments are not negative.
        return jnp.abs(0.02 * jax.random.normal(jax.random.key(len(leaf.shape)), leaf.shape, leaf.dtype))

    return jax.tree.map(made, shapes)


def measure(name: str, topology: str | None, calls: int, *, compile_only: bool = False) -> str:
    """One program's row."""
    import jax

    fn, shapes = program_of(name)
    device = jax.devices()[0]
    step = _step(fn, [device])
    plan = step.plan(*shapes)
    state, *batch = values_of(shapes)
    start = time.perf_counter()
    state = _called(step, state, batch)
    first = time.perf_counter() - start
    state = _called(step, state, batch)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    compiled = _assigned(step, shapes)
    plain, other = jax.jit(fn, donate_argnums=(0,)), values_of(shapes[0])
    other = _called(plain, other, batch)
    ours: list[float] = []
    theirs: list[float] = []
    for index in range(calls):
        for which in (0, 1) if index % 2 else (1, 0):
            start = time.perf_counter()
            if which:
                state = _called(step, state, batch)
            else:
                other = _called(plain, other, batch)
            (ours if which else theirs).append(time.perf_counter() - start)
    spent = statistics.median(ours)
    ratio = statistics.median(one / two for one, two in zip(ours, theirs, strict=True))
    more = ""
    if topology:
        more += f"  calibrated {_step(fn, [device], topology=topology).plan(*shapes).cost.total_s * 1e3:8.2f} ms"
    if compile_only:
        from spmdctx.lowering.compile_only import gpu_devices

        more += f"  compile-only {_assigned(_step(fn, gpu_devices(1)), shapes) / GIB:6.2f}"
    flops = sum(operation.flops * operation.repeats for operation in plan.op_table.operations)
    return (
        f"{name:20} plan {plan.cost.total_s * 1e3:8.2f} ms  measured {spent * 1e3:8.2f} ms  plan/measured {plan.cost.total_s / spent:5.2f}"
        f"  {flops / spent / 1e12:6.1f} TFLOP/s  over jax.jit {ratio:6.4f}  first {first:5.1f} s"
        f"  memory plan {plan.cost.memory_bytes / GIB:6.2f} compiled {compiled / GIB:6.2f} allocator {peak / GIB:6.2f}{more}"
    )


def _step(fn: Callable[..., Any], devices: list[Any], **options: Any) -> Any:
    import spmdctx

    return spmdctx.parallel(fn, parallel_mode="auto_parallel", devices=devices, donate_argnums=(0,), **options)


def _assigned(step: Any, shapes: tuple[Any, ...]) -> int:
    """Bytes that the compiler assigned to a step."""
    from spmdctx.audit import peak_bytes

    return peak_bytes(step.lower(*shapes).compile())


def _called(step: Callable[..., Any], state: Any, batch: list[Any]) -> Any:
    import jax

    state, value = step(state, *batch)
    jax.block_until_ready(value)
    jax.block_until_ready(state)
    return state


def main() -> int:
    """Runs the programs that the arguments choose, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--one", default="", choices=("", *PROGRAMS), help=argparse.SUPPRESS)
    parser.add_argument("--topology", metavar="FILE")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--calls", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.one:
        print(measure(arguments.one, arguments.topology, arguments.calls, compile_only=arguments.compile_only), flush=True)
        return 0
    import jax

    print(f"{datetime.date.today()}  Python {platform.python_version()}, jax {jax.__version__}", flush=True)
    failed = 0
    for name in PROGRAMS:
        if not re.search(arguments.only, name):
            continue
        command = [sys.executable, "-m", "benchmarks.device_fidelity", "--one", name, "--calls", str(arguments.calls)]
        command += ["--topology", arguments.topology] if arguments.topology else []
        command += ["--compile-only"] if arguments.compile_only else []
        done = subprocess.run(command, capture_output=True, text=True)
        failed += bool(done.returncode)
        last = done.stderr.strip().splitlines()[-1:] if done.returncode else done.stdout.strip().splitlines()[-1:]
        print(f"{name} FAILED {last}" if done.returncode else last[0], flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
